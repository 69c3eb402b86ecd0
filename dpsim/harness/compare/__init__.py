"""``dpsim compare``: the results of several runs beside each other, by settings that they have in common."""
