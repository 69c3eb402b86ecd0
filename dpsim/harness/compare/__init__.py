"""Results of several runs, by settings that they have in common; and several machine files."""
