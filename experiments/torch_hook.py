"""``python -m dpsim.experiments.torch_hook`` times DDP with dpsim's hook, and dpsim's own runtime, over DDP with gloo.

Three PyTorch models train on all ranks of one machine by DDP with gloo, by DDP with ``dpsim.torch.allreduce_hook()``,
and by ``dpsim.torch.ModuleTrainer``, in turns. Beside them stand DDP with gloo once more, whose ratio should be 1, and
DDP without any communication, which no hook can beat. Prints how many times as fast as DDP with gloo each is, by
medians with 95 % intervals, and by how much the hook's losses differ from DDP's.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import processor
from dpsim.comm.clock import now
from dpsim.experiments import command
from dpsim.launch.jobs import on_ranks
from dpsim.optimizer import Sgd
from dpsim.progress import Progress
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.statistics import median_ratio

GLOO, AGAIN, FREE, HOOK = "DDP with gloo", "the same again", "DDP, no communication", "DDP with dpsim's hook"
OWN, LEAVES = "dpsim's runtime", "dpsim's runtime, leaves"
LOCAL_BATCHES = {"mlp": (64,), "resnet18": (8,), "gpt": (8,)}
"""Samples a rank and step."""
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9
_COMPARED_LOSSES = 5
_WARM_UP_STEPS = 40
"""Within these the hook has found the fastest way."""
_STEPS_A_VISIT = 3
_LEAST_ROUNDS = 5


def measure(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """Train the models by every way in turns: seconds a step of each visit, of the slowest rank."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(argument["store"], comm.size)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    rows = {}
    for name in argument["models"]:
        for batch in argument["batches"] or LOCAL_BATCHES[name]:
            torch.manual_seed(comm.rank)
            steps, parameters = _steps(name, batch, comm, argument["leaves"])
            losses = {way: [step() for _ in range(_COMPARED_LOSSES)] for way, step in steps.items()}
            for _ in range(_WARM_UP_STEPS - _COMPARED_LOSSES):
                steps[HOOK]()
            stop = StopRule(least_rounds=_LEAST_ROUNDS, most_s=argument["seconds"])
            samples = in_turns({way: _timed(step, comm) for way, step in steps.items()}, stop, comm=comm)
            slowest = {way: np.max(comm.allgather(times), axis=0).tolist() for way, times in samples.items()}
            difference = float(np.max(np.abs(np.subtract(losses[HOOK], losses[GLOO])) / np.abs(losses[GLOO])))
            rows[f"{name}, {parameters / 1e6:.1f} million parameters, {batch} samples a rank"] = {
                "samples_s": slowest,
                "loss_difference": max(comm.allgather(difference)),
            }
            report(f"{name} with {batch} samples a rank: {len(slowest[GLOO])} rounds")
    distributed.destroy_process_group()
    return rows


def _timed(step: Callable[[], float], comm: MPI.Intracomm) -> Callable[[], float]:
    def visit() -> float:
        step()  # what the way before has left in the caches counts for none
        comm.Barrier()
        start_s = now()
        for _ in range(_STEPS_A_VISIT):
            step()
        return (now() - start_s) / _STEPS_A_VISIT

    return visit


def _steps(name: str, batch: int, comm: MPI.Intracomm, leaves: int) -> tuple[dict[str, Callable[[], float]], int]:
    """A function for every way, which trains a copy of the model for one step and returns its loss on this rank."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dpsim.torch
    from dpsim.experiments import torch_models

    module, x, labels = torch_models.MODELS[name](batch)
    tokens = labels[0].numel()
    cross_entropy = torch.nn.functional.cross_entropy

    def by_ddp(hook: Callable[..., Any] | None) -> Callable[[], float]:
        ddp = DistributedDataParallel(copy.deepcopy(module))
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)

        def step() -> float:
            loss = cross_entropy(ddp(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.item())

        return step

    def by_dpsim(**plan: Any) -> Callable[[], float]:
        trainer = dpsim.torch.ModuleTrainer(
            copy.deepcopy(module),
            (x, labels),
            loss=lambda scores, labels: cross_entropy(scores, labels, reduction="sum") / tokens,
            optimizer=Sgd(learning_rate=_LEARNING_RATE, momentum=_MOMENTUM),
            **plan,
        )
        return lambda: trainer.step(x, labels)

    def local(_: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ways = {
        GLOO: by_ddp(None),
        AGAIN: by_ddp(None),
        FREE: by_ddp(lambda state, bucket: local(state, bucket)),
        HOOK: by_ddp(dpsim.torch.allreduce_hook()),
        OWN: by_dpsim(),
    }
    if leaves and not any(isinstance(part, torch.nn.BatchNorm2d) for part in module.modules()):
        ways[LEAVES] = by_dpsim(leaves=leaves)
    return ways, sum(parameter.numel() for parameter in module.parameters())


def main() -> int:
    options = command.parser("torch_hook", __doc__)
    options.add_argument("--devices", type=int, default=2)
    options.add_argument("--models", nargs="+", default=[*LOCAL_BATCHES], choices=[*LOCAL_BATCHES])
    options.add_argument("--local-batch", type=int, nargs="+", help="samples a rank, in place of each model's own")
    options.add_argument("--leaves", type=int, default=0, help="time dpsim's runtime with so many leaves, too")
    options.add_argument("--seconds", type=float, default=30.0, help="for each model, after it was warmed up")
    given = options.parse_args()

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            task = {
                "store": f"{folder}/store",
                "models": given.models,
                "batches": given.local_batch,
                "leaves": given.leaves,
                "seconds": given.seconds,
            }
            rows = on_ranks(
                "dpsim.experiments.torch_hook:measure", task, devices=given.devices, pin=True, progress=command.tell
            )
        print(f"{given.devices} ranks, {processor.model()}")
        for title, row in rows.items():
            print(title)
            for way, times in row["samples_s"].items():
                over = median_ratio(row["samples_s"][GLOO], times)
                print(
                    f"  {way:<24} {np.median(times) * 1e3:9.2f} ms   {over.median:.2f} times as fast"
                    f" ({over.low:.2f} to {over.high:.2f})"
                )
            print(f"  losses of the hook differ from DDP's by {row['loss_difference']:.1g} at most")

    return command.ended("torch_hook", run)


if __name__ == "__main__":
    raise SystemExit(main())
