"""The version of the model that predicts, which records state beside their predictions."""

MODEL_VERSION = 5
"""Raised by every change that alters predicted numbers: prices, schedules, intervals, or how rows become their inputs.

Records from before versions were recorded are of model 0. ``tests/model/test_model_version.py`` holds predictions of
some fixed inputs, and fails where they change while the version stays.
"""
