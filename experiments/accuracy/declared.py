"""What ``make accuracy`` sweeps: rounds of small experiments, each with a profile and a calibration of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from dpsim.harness.sweep.sweep import declared
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
_SHAPED_MODELS = ("mlp:64x20", "cnn", "resnet20", "mlp:512x3")
_LONG_STEPS, _LONG_STEPS_BUDGET_S = ("resnet20", "mlp:512x3"), 60.0
"""Models whose steps take up to a second on 8 hosts, and seconds for these and for 8 hosts: enough for each setting."""
_CONDITIONS = ("slow_host", "background", "oversubscribed")


def experiments(*, quick: bool = False) -> tuple[Experiment, ...]:
    """Return every experiment, in the order of the rounds. Names are unique: a finished one is never run again."""
    rounds = range(QUICK_ROUNDS if quick else ROUNDS)
    budget_s = _QUICK_BUDGET_S if quick else _BUDGET_S
    shaped = range(1 if quick else len(_SHAPED_MODELS))
    return tuple(
        [each for number in rounds for each in _round(number, budget_s)]
        + [each for number in shaped for each in _on_shaped_hosts(number, budget_s)]
    )


def _on_shaped_hosts(number: int, budget_s: float) -> tuple[Experiment, ...]:
    """Return the sweeps of ``experiments/sweeps/shaped_*.toml`` with one model and two of the conditions.

    What is predicted without having been calibrated on: another rate of 2 hosts, a condition of 4, and 8 hosts.
    """
    conditions = [_CONDITIONS[each % len(_CONDITIONS)] for each in (number, number + 1)]
    experiments = [declared(f"shaped_{name}") for name in ("2", "4", *conditions, "8")]
    model = _SHAPED_MODELS[number]

    def seconds(of: Experiment) -> float:
        return max(budget_s, _LONG_STEPS_BUDGET_S) if model in _LONG_STEPS or of.name == "shaped-8" else budget_s

    return tuple(
        replace(each.changed(model=model), name=f"{each.name}-{number:02d}", seed=number, budget_s=seconds(each))
        for each in experiments
    )


def _round(number: int, budget_s: float) -> tuple[Experiment, ...]:
    """Return a sweep with real computation, in some rounds another one with emulated computation or over norms.

    Even rounds go over the local batch, odd ones over the fusion threshold.
    """
    networks = ("node", _LINKS[number % len(_LINKS)])

    def sweep(
        name: str, models: Sequence[_Model], thresholds: Sequence[float | str], most_s: float, base: Any, **axes: Any
    ) -> Experiment:
        token, batches, global_batch = models[number % len(models)]
        base = {**base, "model": token, "optimizer": _SGD}
        if number % 2:
            base["global_batch"], axes["fusion_threshold_bytes"] = global_batch, thresholds
        else:
            axes["local_batch"] = batches
        question = "fusion-threshold" if number % 2 else "local-batch"
        name = f"{name}-{number:02d}"
        return Experiment(name=name, question=question, base=base, axes=axes, seed=number, budget_s=most_s)

    real = sweep("real", _MODELS, _THRESHOLDS, budget_s, {"overlap": "auto"}, network=networks, devices=(1, 2))
    overlap = ("off", "thread")[number // _EMULATED_EVERY % 2]
    emulated = sweep(
        "emulated",
        _EMULATED_MODELS,
        _EMULATED_THRESHOLDS,
        min(budget_s, _EMULATED_BUDGET_S),
        {"compute": "emulated", "algorithm": "halving-doubling", "overlap": overlap},
        network=(_EMULATED_LINK,),
        devices=(1, 4, 8),
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
