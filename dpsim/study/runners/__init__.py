"""Runners: each opens what a study visits on running ranks, and keeps what a visit shows."""
