"""``sweep``: predict every point of an experiment, measure it, and compare the two."""
