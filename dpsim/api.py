"""``fit``: training from user code, on the ranks of the job that the program runs in (one, outside a job)."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dpsim.data import Dataset, load_dataset
from dpsim.errors import ConfigError, DpsimError, unknown
from dpsim.launch import worker
from dpsim.launch.attached_job import one_thread
from dpsim.machine import Network, check_algorithm
from dpsim.plan import Plan
from dpsim.replica import Replica
from dpsim.runtime import checkpoints
from dpsim.runtime import fit as loop
from dpsim.runtime.trainer import Trainer

if TYPE_CHECKING:
    from dpsim.records.sweep import TrainResult
    from dpsim.runtime.fit import Callback


def fit(
    replica: Replica,
    dataset: Dataset | str,
    *,
    global_batch: int,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    network: str = "node",
    rate: Callable[[int], float] | None = None,
    stall_after_s: float = 60.0,
    resume: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **plan: Any,
) -> TrainResult:
    """Train ``replica`` on every rank of this job, then test it. Every rank calls it and gets the same result.

    ``dataset`` is a token (``digits``) or a ``Dataset``; ``global_batch`` samples a step are shared among the ranks;
    ``steps`` may end training before ``epochs`` do (1 epoch without either); ``rate`` gives the learning rate of each
    step, counted from 0; stalls of ``stall_after_s`` and longer are told on stderr; ``resume`` is a folder of
    checkpoints (``dpsim.Checkpoints``) to go on from; ``plan`` takes the other fields of ``dpsim.Plan``
    (``optimizer``, ``fusion_rule``, ``fusion_threshold_bytes``, ``algorithm``, ``overlap`` ...). Without them: SGD with
    learning rate 0.05, momentum 0.9 and no weight decay, rule ``tarantella`` at 32 KiB, on a node algorithm ``auto``,
    overlap ``off``.

    Start it with ``dpsim launch local --devices 2 script.py``, or ``mpiexec -n 2 python script.py``.
    Raises ``ConfigError``, ``NotFiniteError``; on several ranks an uncaught exception ends all of them.
    """
    if min(1 if epochs is None else epochs, 1 if steps is None else steps) < 1:
        raise ConfigError(f"{epochs} epochs and {steps} steps", allowed="1 or more of each")
    comm = worker.world()
    if comm.size > 1:
        sys.excepthook = _end_all
    where = Network.parse(network)
    for name in plan:
        if name not in Plan.__struct_fields__ or name == "devices":
            raise unknown("argument of fit:", name, [field for field in Plan.__struct_fields__ if field != "devices"])
    usual = {"algorithm": where.default_algorithm(), "batch_norm": Plan.default_batch_norm(plan.get("leaves", 0))}
    chosen = Plan(devices=comm.size, global_batch=global_batch, **(usual | plan))
    check_algorithm(chosen.algorithm, where)
    data = load_dataset(dataset, seed) if isinstance(dataset, str) else dataset
    with one_thread():
        trainer = Trainer(replica, data, chosen, comm, where, seed=seed, rate=rate, stall_after_s=stall_after_s)
        if resume is not None:
            checkpoints.resume(trainer, Path(resume))
        ends = [] if steps is None else [steps]
        if epochs is not None or steps is None:
            ends.append(trainer.steps_per_epoch * (epochs or 1))
        return loop.fit(trainer, min(ends), callbacks)


def _end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What happens to an uncaught exception on one of several ranks, which the others would wait for without end."""
    if isinstance(error, DpsimError):
        print(f"dpsim: {error}", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    time.sleep(0.2)  # the launcher passes these lines on before it hears of the end
    worker.abort(error)
