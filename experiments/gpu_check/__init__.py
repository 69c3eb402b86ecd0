"""Everything that needs a GPU, in one run of a few minutes: ``python -m dpsim.experiments.gpu_check``."""
