"""The report of a reproducibility check."""
