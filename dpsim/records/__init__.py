"""What a sweep, a benchmark and a reproducibility check leave behind: immutable, versioned, raw samples kept."""
