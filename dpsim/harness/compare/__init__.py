"""``dpsim compare``: the results of several runs, by settings that they have in common; and several machine files."""
