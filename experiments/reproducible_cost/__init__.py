"""What reproducible training costs: its step against the plain one at the same global batch, in turn in one run."""
