"""Attacks on dpsim: kills, damaged files, senseless commands and strangers at its port."""
