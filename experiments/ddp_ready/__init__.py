"""Predicted times at which gradients are final against those of DDP on two ranks."""
