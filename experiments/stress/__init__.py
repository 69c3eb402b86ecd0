"""Stress tests: killed commands and ranks, and broken science."""
