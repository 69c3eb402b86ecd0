"""The same training by PyTorch and by dpsim, timed in turn in one run: ``python -m dpsim.experiments.peers --help``."""
