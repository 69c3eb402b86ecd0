"""Whether ``dpsim reproduce --torch-script`` tells a planted mistake from rounding."""
