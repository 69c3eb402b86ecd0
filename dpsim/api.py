"""``fit``: training from user code, on the ranks of the job that the program runs in (one rank outside a job)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

from dpsim.arguments import TrainingSettings, shows
from dpsim.constraints import check
from dpsim.data import Dataset, load_dataset
from dpsim.errors import ConfigError, unknown
from dpsim.launch import rank_info
from dpsim.launch.rank_process import end_all, one_thread
from dpsim.machine import Network
from dpsim.plan import Plan
from dpsim.replica import Replica
from dpsim.runtime import checkpoints
from dpsim.runtime import fit as loop
from dpsim.runtime.trainer import Trainer
from dpsim.setting import plan_of

if TYPE_CHECKING:
    from dpsim.records.train import TrainResult
    from dpsim.runtime.fit import Callback


@shows(TrainingSettings)
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
    stall_after_s: float | None = None,
    resume: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **plan: Unpack[TrainingSettings],
) -> TrainResult:
    """Train ``replica`` on every rank of this job, then test it. Every rank calls it and gets the same result.

    ``dataset`` is a ``Dataset`` or its name (``digits``). The ranks share the ``global_batch`` samples of a step.
    Training ends after ``epochs`` or ``steps``, whichever comes first, and after 1 epoch without either. ``rate`` gives
    the learning rate of each step, counted from 0. Waits of ``stall_after_s`` and longer are reported on stderr: of
    60 s if it is not named, or of what ``dpsim launch local --stall-after`` says. ``resume`` is a folder of checkpoints
    (``dpsim.Checkpoints``) to resume from.

    ``plan`` takes the other fields of ``dpsim.Plan`` (``optimizer``, ``fusion_rule``, ``fusion_threshold_bytes``,
    ``algorithm``, ``overlap`` ...). The defaults are SGD with learning rate 0.05, momentum 0.9 and no weight decay,
    rule ``tarantella`` at 32 KiB, overlap ``off``, and on a node the algorithm ``auto``.

    Start it with ``dpsim launch local --devices 2 script.py``, or ``mpiexec -n 2 python script.py``.
    Raises ``ConfigError`` and ``NotFiniteError``. On several ranks an uncaught exception ends all of them.
    """
    if min(1 if epochs is None else epochs, 1 if steps is None else steps) < 1:
        raise ConfigError(f"{epochs} epochs and {steps} steps", allowed="1 or more of each")
    comm = rank_info.world()
    if comm.size > 1:
        sys.excepthook = _end_all
    parsed_network = Network.parse(network)
    complete_plan = _complete_plan({"devices": comm.size, "global_batch": global_batch}, plan, parsed_network)
    data = load_dataset(dataset, seed) if isinstance(dataset, str) else dataset
    with one_thread():
        after_s = rank_info.stall_after_s if stall_after_s is None else stall_after_s
        trainer = Trainer(
            replica, data, complete_plan, comm, parsed_network, seed=seed, rate=rate, stall_after_s=after_s
        )
        if resume is not None:
            checkpoints.resume(trainer, Path(resume))
        ends = [] if steps is None else [steps]
        if epochs is not None or steps is None:
            ends.append(trainer.steps_per_epoch * (epochs or 1))
        return loop.fit(trainer, min(ends), callbacks)


def _complete_plan(row: dict[str, int], plan: TrainingSettings, network: Network) -> Plan:
    """Return the plan of a row with other fields by name. Raises ``ConfigError`` for what does not go together."""
    for name in plan:
        if name not in TrainingSettings.__annotations__:
            raise unknown("argument of fit:", name, TrainingSettings.__annotations__)
    complete_plan = plan_of({**row, **plan}, network.default_algorithm)
    check("network", algorithm=complete_plan.algorithm, network=network)
    return complete_plan


def _end_all(_: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook for uncaught exceptions on one of several ranks: the others would wait for it forever."""
    end_all(error.with_traceback(trace))
