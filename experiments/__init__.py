"""Declared experiments and what they need beside them. Imported as ``dpsim.experiments``."""
