"""What ``make accuracy`` sweeps: rounds of small experiments, each with a profile and a calibration of its own."""

from __future__ import annotations

from typing import Any

from dpsim.records.sweep import Experiment

ROUNDS, QUICK_ROUNDS = 20, 3
_BUDGET_S, _QUICK_BUDGET_S = 20.0, 5.0
_EMULATED_BUDGET_S = 6.0
_NORM_EVERY, _EMULATED_EVERY = 5, 4
"""Rounds from one sweep over batch norm to the next, and from two sweeps with emulated computation to the next two."""
_SGD = {"kind": "sgd", "learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.001}
_Model = tuple[str, tuple[int, ...], int]
_MODELS: tuple[_Model, ...] = (
    ("mlp:64x20", (32, 64, 128, 256), 512),
    ("cnn:16,32", (4, 8, 16, 32), 64),
    ("mlp:256x4", (16, 32, 64, 128), 256),
)
"""Models with their local batches, of which the second is not profiled, and the global batch of their thresholds."""
_EMULATED_MODELS: tuple[_Model, ...] = (("cnn", (16, 32, 64, 128), 128), ("mlp:64x20", (64, 128, 256, 512), 1024))
"""Models with batches so large that their steps take long enough for ranks to keep their times."""
_THRESHOLDS = (0.0, 16384.0, 131072.0, "inf")
_LINKS = ("paced:50us,1gbit", "paced:200us,500mbit")
_EMULATED_LINK = "paced:1ms,500mbit"
"""Slow enough for 8 ranks on 2 cores, by an algorithm with few rounds."""
_EMULATED_THRESHOLDS = (65536.0, 131072.0, 262144.0, "inf")


def experiments(*, quick: bool = False) -> tuple[Experiment, ...]:
    """Return every experiment, in the order of the rounds. Names are unique: a finished one is never run again."""
    rounds = range(QUICK_ROUNDS if quick else ROUNDS)
    return tuple(each for number in rounds for each in _round(number, _QUICK_BUDGET_S if quick else _BUDGET_S))


def _round(number: int, budget_s: float) -> tuple[Experiment, ...]:
    """Return a sweep with real computation, in some rounds another one with emulated computation or over norms."""
    networks = ("node", _LINKS[number % len(_LINKS)])
    real = _sweep(
        f"real-{number:02d}",
        number,
        budget_s,
        _MODELS[number % len(_MODELS)],
        {"network": networks, "devices": (1, 2)},
        {"overlap": "auto"},
        _THRESHOLDS,
    )
    overlap = ("off", "thread")[number // _EMULATED_EVERY % 2]
    emulated = _sweep(
        f"emulated-{number:02d}",
        number,
        min(budget_s, _EMULATED_BUDGET_S),
        _EMULATED_MODELS[number % len(_EMULATED_MODELS)],
        {"network": (_EMULATED_LINK,), "devices": (1, 4, 8)},
        {"compute": "emulated", "algorithm": "halving-doubling", "overlap": overlap},
        _EMULATED_THRESHOLDS,
    )
    norms = Experiment(
        name=f"batch-norm-{number:02d}",
        question="batch-norm",
        base={"model": "cnn:16,32", "overlap": "off", "optimizer": _SGD},
        axes={"network": networks, "devices": (1, 2), "local_batch": (8, 32)},
        seed=number,
        budget_s=budget_s,
    )
    with_emulated, with_norms = number % _EMULATED_EVERY < 2, number % _NORM_EVERY == 0
    return real, *[emulated] * with_emulated, *[norms] * with_norms


def _sweep(
    name: str,
    number: int,
    budget_s: float,
    model: _Model,
    axes: dict[str, Any],
    base: dict[str, Any],
    thresholds: tuple[float | str, ...],
) -> Experiment:
    """Return a sweep over the local batch in even rounds, over the fusion threshold in odd ones."""
    token, batches, global_batch = model
    over_batches = number % 2 == 0
    base = base | {"model": token, "optimizer": _SGD}
    return Experiment(
        name=name,
        question="local-batch" if over_batches else "fusion-threshold",
        base=base if over_batches else base | {"global_batch": global_batch},
        axes=axes | ({"local_batch": batches} if over_batches else {"fusion_threshold_bytes": thresholds}),
        seed=number,
        budget_s=budget_s,
    )
