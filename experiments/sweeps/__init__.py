"""The declared sweeps of ``dpsim sweep``."""
