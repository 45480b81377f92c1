"""From records to statements: statistics, tables, pages, and the verification of a record."""
