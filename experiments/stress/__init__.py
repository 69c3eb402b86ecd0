"""Stress tests: killed ranks, hostile input and connections."""
