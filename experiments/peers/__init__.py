"""The same training done by PyTorch and by dpsim, in turn, in one run. ``python -m dpsim.experiments.peers --help``."""
