"""Prices a Schedule on a Machine: step times, timelines, memory, the nulls. Needs no MPI and runs on any laptop."""

from dpsim.predict.compare import choose_overlap, nulls, recommended
from dpsim.predict.cost import alpha_beta, collective_cost, compute_slowdown
from dpsim.predict.memory import Memory, memory
from dpsim.predict.points import predict_points
from dpsim.predict.step import Prediction, PricedStep, interval, predict, price, scheduled, step_times, timeline

__all__ = [
    "Memory",
    "Prediction",
    "PricedStep",
    "alpha_beta",
    "choose_overlap",
    "collective_cost",
    "compute_slowdown",
    "interval",
    "memory",
    "nulls",
    "predict",
    "predict_points",
    "price",
    "recommended",
    "scheduled",
    "step_times",
    "timeline",
]
