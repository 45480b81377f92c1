"""Evidence: trained and judged cells, sweeps of them, the paper's tables and figures, and what they say for users."""
