"""Calibrate, profile, measure, sweep, compare, reproduce: the verbs that join model and runtime."""
