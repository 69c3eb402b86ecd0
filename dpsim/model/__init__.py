"""Prices a Schedule on a Machine: step times, timelines, memory, the nulls. Needs no MPI and runs on any laptop."""

from dpsim.model.compare import choose_overlap, nulls, recommended
from dpsim.model.cost import alpha_beta, collective_cost, compute_slowdown
from dpsim.model.defaults import for_prediction
from dpsim.model.interval import interval, predict
from dpsim.model.memory import Memory, memory
from dpsim.model.points import predict_on_machines, predict_one, predict_points
from dpsim.model.residuals import LEVEL
from dpsim.model.step import Prediction, PricedStep, price, scheduled, step_times, timeline

__all__ = [
    "LEVEL",
    "Memory",
    "Prediction",
    "PricedStep",
    "alpha_beta",
    "choose_overlap",
    "collective_cost",
    "compute_slowdown",
    "for_prediction",
    "interval",
    "memory",
    "nulls",
    "predict",
    "predict_on_machines",
    "predict_one",
    "predict_points",
    "price",
    "recommended",
    "scheduled",
    "step_times",
    "timeline",
]
