"""Ranks of a script that wait, asleep, until it is their turn to train, to be profiled or to time collectives."""
