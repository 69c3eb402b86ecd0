"""The cost of reproducible training: its step against the plain one at the same global batch, timed in turn."""
