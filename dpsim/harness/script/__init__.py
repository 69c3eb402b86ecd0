"""Measures a user's own PyTorch script under DistributedDataParallel, and predicts it before."""
