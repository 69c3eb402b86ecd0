"""The report of several runs beside each other."""
