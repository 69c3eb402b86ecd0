"""``python -m dpsim.experiments.staleness_loss`` trains with gradients of one staleness after the other.

Orders of updates in which every gradient is computed from parameters that are exactly so many updates old are replayed
on one device, so that nothing depends on time: the same bits each time. The logarithm of the loss of the last epoch,
a mean over seeds, is fitted by a parabola in the staleness on all but one of them, and predicted for the one that was
left out. The guess beside it is the mean of the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.data import load_dataset
from dpsim.experiments import command
from dpsim.launch.jobs import on_ranks
from dpsim.nn import build_model
from dpsim.optimizer import Sgd
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime import asynchronous
from dpsim.runtime.update_order import UpdateOrder

_STALENESS, _SEEDS = (0, 1, 2, 3, 4, 6, 8), 5
_MODEL, _DATA, _GLOBAL_BATCH, _RATE, _EPOCHS = "mlp:32,32", "digits", 32, 0.05, 5


def constant(staleness: int, updates: int) -> UpdateOrder:
    """Return the order in which every update is computed from parameters of that staleness, as soon as there are."""
    return UpdateOrder(
        takers=(0,) * updates,
        pulls=tuple((max(update - staleness, 0),) for update in range(updates)),
        orders=(tuple(range(updates)),),
    )


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[list[float]]:
    """Return the mean loss of the last epoch for each staleness (rows) and seed, in nats."""
    data, optimizer = load_dataset(_DATA), Sgd(learning_rate=_RATE, momentum=0.0)
    plan = Plan(devices=1, global_batch=_GLOBAL_BATCH, strategy="parameter-server", optimizer=optimizer)
    rows: list[list[float]] = []
    for staleness in _STALENESS:
        report(f"staleness {staleness}")
        rows.append([])
        for seed in range(_SEEDS):
            replica = build_model(_MODEL, data.input_shape, data.classes)
            worker = asynchronous.Worker(replica, data, plan, 1, seed, comm)
            order = constant(staleness, _EPOCHS * worker.steps_per_epoch)
            result = asynchronous.replay(comm, worker, plan, order, lambda step: _RATE)
            rows[-1].append(float(np.mean(result.losses[-worker.steps_per_epoch :])))
    return rows


def left_out(staleness: tuple[int, ...], loss: list[float], index: int) -> tuple[float, float]:
    """Return the loss at one staleness, predicted from the losses at the others, and the mean of these."""
    others = [number for number in range(len(staleness)) if number != index]
    known, logarithms = np.array(staleness, float)[others], np.log(np.array(loss)[others])
    parabola = np.polynomial.Polynomial.fit(known, logarithms, 2)
    return float(np.exp(parabola(staleness[index]))), float(np.mean(np.array(loss)[others]))


def main() -> int:
    command.parser("staleness_loss", __doc__).parse_args()

    def run() -> None:
        rows = on_ranks("dpsim.experiments.staleness_loss:train_on_ranks", {}, devices=1, progress=command.tell)
        loss = [float(np.mean(row)) for row in rows]
        errors = []
        for index, (staleness, row) in enumerate(zip(_STALENESS, rows, strict=True)):
            predicted, null = left_out(_STALENESS, loss, index)
            inner = 0 < index < len(rows) - 1
            errors += [(abs(predicted / loss[index] - 1), abs(null / loss[index] - 1))] if inner else []
            shown = (
                f"left out: {predicted:.4f} ({predicted / loss[index] - 1:+.1%})" if inner else "an end of the range"
            )
            deviation = np.std(row, ddof=1) / np.sqrt(len(row))
            print(f"staleness {staleness:2d}: loss {loss[index]:.4f} +- {deviation:.4f}; {shown}")
        of_model, of_null = np.median(errors, axis=0)
        print(f"median error {of_model:.1%}; of the mean of the others {of_null:.1%}")

    return command.ended("staleness_loss", run)


if __name__ == "__main__":
    raise SystemExit(main())
