"""``study``: declares, visits in rounds, predicts, derives: what every measurement of dpsim has in common."""
