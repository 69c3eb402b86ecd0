"""Executes a Schedule with real training, and records the Timeline of what happened."""
