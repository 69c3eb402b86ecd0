"""dpsim: data-parallel training, predicted and measured in the same run."""

__version__ = "0.1.0"
