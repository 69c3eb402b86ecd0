"""What the tests of the Python API run on ranks: user code, as a user would write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import dpsim
from dpsim.errors import DpsimError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.progress import Progress

Array = NDArray[Any]


def softmax_regression(
    w: Mapping[str, Array], x: Array, labels: NDArray[np.int64]
) -> tuple[float, int, dict[str, Array]]:
    """Loss, correct predictions and gradients of one dense layer, summed over the samples."""
    x, target = x.reshape(len(x), -1), np.eye(10, dtype=x.dtype)[labels]
    p = np.exp(x @ w["weight"] + w["bias"])
    p /= p.sum(axis=1, keepdims=True)
    gradients = {"weight": x.T @ (p - target), "bias": (p - target).sum(axis=0)}
    return float(-np.log(p[target > 0]).sum()), int((p.argmax(axis=1) == labels).sum()), gradients


START = {"weight": np.zeros((64, 10), np.float32), "bias": np.zeros(10, np.float32)}


class Diary(dpsim.Callback):
    """Writes down everything it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_begin(self, trainer: dpsim.Trainer) -> None:
        self.seen.append("begin")

    def on_step_end(self, trainer: dpsim.Trainer, outcome: Any) -> None:
        self.seen.append(["step", outcome.sums.samples, outcome.global_samples])

    def on_epoch_end(self, trainer: dpsim.Trainer, epoch: dpsim.Epoch) -> None:
        self.seen.append(["epoch", epoch.number, epoch.steps, epoch.total_steps, epoch.loss, epoch.accuracy])

    def on_train_end(self, trainer: dpsim.Trainer, result: dpsim.TrainResult) -> None:
        self.seen.append(["end", result.test_accuracy])


class TestsInBetween(dpsim.Callback):
    """A collective callback: tests after every epoch."""

    def __init__(self) -> None:
        self.accuracies: list[float] = []

    def on_epoch_end(self, trainer: dpsim.Trainer, epoch: dpsim.Epoch) -> None:
        test = trainer.evaluate()
        self.accuracies.append(test.correct / test.samples)


def _too_large_for_one_shot() -> dpsim.Replica:
    """A model with more bytes of gradients than a one-shot allreduce takes: only a rank that prepares it finds out."""
    return dpsim.build_model("mlp:256", (8, 8, 1), 10)


def registered(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[bool]:
    """Whether each rank knows a fusion rule of that name."""
    return comm.allgather(argument["rule"] in FUSION_RULES)


def everything(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """One run with callbacks on all ranks and on one, the same run again from dpsim's own model, and refusals."""
    everywhere, last, tests = Diary(), Diary(), TestsInBetween()
    callbacks = [everywhere, dpsim.OnRank(last, comm.size - 1), tests]
    own = dpsim.FunctionReplica(START, softmax_regression)
    result = dpsim.fit(own, "digits", global_batch=100, epochs=2, callbacks=callbacks)
    data = dpsim.load_dataset("digits")
    short = dpsim.fit(
        dpsim.build_model("mlp:8", data.input_shape, data.classes),
        data,
        global_batch=64,
        epochs=5,
        steps=3,
        optimizer=dpsim.Sgd(learning_rate=0.01),
        fusion_rule="per-tensor",
        overlap="poll",
        accumulate=2,
        seed=3,
    )
    own_run = {"replica": own, "dataset": data, "global_batch": 100}
    folder = argument["folder"]
    dpsim.fit(**own_run, steps=8, callbacks=[dpsim.Checkpoints(folder, every=3)])
    resumed = dpsim.fit(**own_run, epochs=2, resume=folder, callbacks=[dpsim.Checkpoints(folder)])
    refused = []
    wrong = dpsim.FunctionReplica(START, lambda w, x, labels: (0.0, 0, {"weight": np.zeros((10, 64))}))
    for arguments in (
        {"epochs": 0},
        {"fusionrule": "ddp"},
        {"devices": 2},
        {"algorithm": "rign"},
        {"replica": wrong},
        {"replica": _too_large_for_one_shot(), "algorithm": "one-shot", "fusion_rule": "one"},
    ):
        try:
            dpsim.fit(**{"replica": own, "dataset": "digits", "global_batch": 64} | arguments)
        except DpsimError as error:
            refused.append(str(error))
    mine = {
        "rank": dpsim.rank(),
        "size": dpsim.size(),
        "local": [dpsim.local_rank(), dpsim.local_size()],
        "everywhere": everywhere.seen,
        "last": last.seen,
        "tests": tests.accuracies,
        "refused": refused,
        "accuracy": result.test_accuracy,
        "losses": list(result.losses),
        "digest": result.digest,
        "short": [short.steps, short.digest],
        "resumed": [resumed.first_step, resumed.digest == result.digest, resumed.losses == result.losses],
    }
    return comm.allgather(mine)
