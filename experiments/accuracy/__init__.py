"""How right dpsim's predictions are, measured: ``make accuracy``."""
