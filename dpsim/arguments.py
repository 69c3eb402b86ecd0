"""The keyword arguments of ``dpsim.fit`` and ``dpsim.predict`` that are settings, typed, and shown in signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal, TypedDict, TypeVar

from dpsim.dtypes import ComputeDtype, WireDtype
from dpsim.optimizer import Optimizer
from dpsim.plan import BatchNormMode, Overlap

Function = TypeVar("Function", bound=Callable[..., object])


class _Settings(TypedDict, total=False):
    accumulate: int
    fusion_rule: str
    cycle_s: float
    algorithm: str
    batch_norm: BatchNormMode
    optimizer: Optimizer
    wire_dtype: WireDtype | None
    strategy: str
    leaves: int
    compute_dtype: ComputeDtype


class TrainingSettings(_Settings, total=False):
    """The fields of ``dpsim.Plan`` that ``dpsim.fit`` takes; the number of devices is the job's."""

    fusion_threshold_bytes: float | None
    layout: str
    overlap: Overlap


class PredictionSettings(_Settings, total=False):
    """Arguments of ``dpsim.predict`` besides ``devices`` and ``threshold``: a global batch or a local one, and how."""

    global_batch: int
    local_batch: int
    overlap: Overlap | Literal["auto"]


def shows(settings: type) -> Callable[[Function], Function]:
    """Return a decorator: the signature of a function that takes ``**settings`` lists each of them, as help shows it.

    The function itself gets them in one dict, so that it can refuse a wrong name in its own words.
    """
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=annotation.__forward_arg__)
        for name, annotation in settings.__annotations__.items()
    ]

    def decorate(function: Function) -> Function:
        plain = inspect.signature(function)
        positional = [each for each in plain.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = plain.replace(parameters=[*positional, *named])  # type: ignore[attr-defined]
        return function

    return decorate
