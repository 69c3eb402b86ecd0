"""Prices a Schedule on a Machine: step times, timelines, memory, the nulls. Needs no MPI and runs on any laptop."""

from dpsim.predict.compare import choose_overlap, nulls, recommended
from dpsim.predict.cost import alpha_beta, collective_cost, compute_slowdown
from dpsim.predict.memory import Memory, memory
from dpsim.predict.points import predict_points
from dpsim.predict.step import Prediction, interval, predict, scheduled, speed_steps_s, step_times, timeline

__all__ = [
    "Memory",
    "Prediction",
    "alpha_beta",
    "choose_overlap",
    "collective_cost",
    "compute_slowdown",
    "interval",
    "memory",
    "nulls",
    "predict",
    "predict_points",
    "recommended",
    "scheduled",
    "speed_steps_s",
    "step_times",
    "timeline",
]
