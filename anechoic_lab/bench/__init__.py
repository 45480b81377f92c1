"""Speed against peers and against the machine's own limit, measured side by side in one run."""
