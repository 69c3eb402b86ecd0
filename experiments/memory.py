"""``python -m dpsim.experiments.memory`` compares predicted memory with what ranks allocate, and that with growth.

In a job of its own each strategy trains on a few samples first, so that everything is compiled, and then a larger
model on more. Allocated are the parameters, gradients, optimizer state, running statistics, work arrays and messages of
the latter, as the runtime counts them. The processes grow by the pages that the operating system counts for them, where
memory that several ranks share counts in proportion (``Pss`` in ``/proc/self/smaps_rollup``).
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.codec import Noun
from dpsim.data import Dataset, load_dataset
from dpsim.experiments import command
from dpsim.experiments.cases import Record, Study
from dpsim.harness import models
from dpsim.machine import Link, Machine, Network
from dpsim.model.memory import memory
from dpsim.optimizer import AdamW
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.describe import describe, with_work_bytes
from dpsim.runtime.trainer import Trainer
from dpsim.workload import Workload

_DATA, _STEPS = "synthetic:16x16x3,classes=10,train=512,test=8", 3
_SMALL = {"mlp": "mlp:8x8", "cnn": "cnn:4,4", "resnet20": "resnet20", "blocks": "mlp:32x8,column_blocks=2"}
_FEW, _MANY = 8, 256
_LARGE = {
    "mlp": "mlp:1024x8",
    "cnn": "cnn:64,128",
    "resnet20": "resnet20",
    "blocks": "mlp:1024x8,column_blocks=2",
}
_STRATEGIES = (
    ("data-parallel", 1),
    ("zero1", 1),
    ("zero2", 1),
    ("zero3", 1),
    ("zero3:reshard=no", 1),
    ("pipeline", 4),
    ("pipeline:order=gpipe", 4),
    ("pipeline:recompute=yes", 4),
)


class Case(Noun, frozen=True):
    """A strategy with so many micro-batches, that trains a model of this kind."""

    model: str
    strategy: str
    accumulate: int
    devices: int = 2

    @property
    def title(self) -> str:
        return f"{_LARGE[self.model]}, {self.devices} devices, {self.strategy}, {self.accumulate} micro-batches"

    def plan(self, global_batch: int) -> Plan:
        """The plan at a global batch."""
        return Plan(
            devices=self.devices,
            global_batch=global_batch,
            accumulate=self.accumulate,
            strategy=self.strategy,
            optimizer=AdamW(),
            fusion_threshold_bytes=2**20,
        )


CASES = (
    *(
        Case(model=model, strategy=name, accumulate=count)
        for model in ("mlp", "cnn", "resnet20")
        for name, count in _STRATEGIES
    ),
    *(Case(model="blocks", strategy=name, accumulate=1) for name in ("data-parallel", "tensor")),
    *(
        Case(model="blocks", strategy=name, accumulate=count, devices=4)
        for name, count in (("tensor", 1), ("tensor:shard=yes", 1), ("pipeline:parts=2", 4))
    ),
)
STUDY: Study[Case] = Study(
    name="memory",
    schema="dpsim.memory/1",
    record=Record[Case],
    samples=("predicted_bytes", "allocated_bytes", "grown_bytes"),
    task="dpsim.experiments.memory:train_on_ranks",
    pin=False,
)


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """Return for each rank of a ``Case`` what it allocated and grew by, and the prediction for the largest."""
    case, data = codec.decode(argument["case"], Case, "case"), load_dataset(_DATA)
    workload = with_work_bytes(_described(_LARGE[case.model], data), _replica(_LARGE[case.model], data))
    plan, machine = case.plan(_MANY), Machine(name="any", link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    _train(comm, case.plan(_FEW), _SMALL[case.model], data).close()
    gc.collect()
    before = _pages_bytes()
    trainer = _train(comm, plan, _LARGE[case.model], data)
    grown = comm.allgather(float(_pages_bytes() - before))
    allocated = comm.allgather(float(trainer.memory_bytes))
    trainer.close()
    needed = memory(workload, plan, machine)
    predicted = float(needed.total - needed.communication_buffers)
    return {"predicted_bytes": [predicted], "allocated_bytes": allocated, "grown_bytes": grown}


def _replica(token: str, data: Dataset) -> Any:
    return models.load(token, data.input_shape, data.classes).replica()


def _described(token: str, data: Dataset) -> Workload:
    return describe(_replica(token, data), token)


def _train(comm: MPI.Intracomm, plan: Plan, token: str, data: Dataset) -> Trainer:
    trainer = Trainer(_replica(token, data), data, plan, comm, Network())
    for _ in range(_STEPS):
        trainer.step()
    return trainer


def _pages_bytes() -> int:
    """What the operating system counts for this process; shared pages in proportion."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def lines(record: Record[Case]) -> list[str]:
    """Return a line for each case: the largest rank, predicted and allocated; all ranks, allocated and grown."""
    shown = []
    for each in record.measured:
        allocated, grown = each.samples["allocated_bytes"], each.samples["grown_bytes"]
        predicted = each.samples["predicted_bytes"][0]
        shown.append(
            f"{each.case.title}: predicted {predicted / 2**20:.1f} MiB, allocated {max(allocated) / 2**20:.1f} MiB "
            f"({predicted / max(allocated) - 1:+.1%}); all ranks allocated {sum(allocated) / 2**20:.1f} MiB, the "
            f"processes grew by {sum(grown) / 2**20:.1f} MiB ({sum(allocated) / sum(grown) - 1:+.1%})"
        )
    errors = [
        abs(each.samples["predicted_bytes"][0] / max(each.samples["allocated_bytes"]) - 1) for each in record.measured
    ]
    apart = [
        abs(sum(each.samples["allocated_bytes"]) / sum(each.samples["grown_bytes"]) - 1) for each in record.measured
    ]
    return [
        *shown,
        f"Largest error of the prediction {max(errors):.1%}. Allocated differs from growth by at most {max(apart):.1%} "
        f"(median {np.median(apart):.1%}).",
    ]


def main() -> int:
    return command.recorded("memory", __doc__, functools.partial(STUDY.measure, CASES), lines)


if __name__ == "__main__":
    raise SystemExit(main())
