"""Starts, attaches to, watches and ends the ranks of a job, and reports why one failed."""
