"""Profiles a user's own PyTorch script: it trains as rank 0 of n in one process, and what it does is recorded."""
