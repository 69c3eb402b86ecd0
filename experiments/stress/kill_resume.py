"""Kills ranks of reproducible runs at random moments, lets the runs go on, and looks at what they end in.

``python -m dpsim.experiments.stress.kill_resume [--rounds 200] [--seed 0]``. In a round a training begins on a
random number of devices, with random buckets, overlap and allreduce. At a random moment SIGKILL ends one rank or
several; the run goes on by itself (``elastic``), or is resumed on another random number of devices, and may be killed
once more. It must end in the digest and the losses of the run that nothing happened to, and leave no
process and no unfinished file.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from dpsim import codec
from dpsim.harness.train.config import TrainConfig
from dpsim.harness.train.resume import configured
from dpsim.harness.train.train import train
from dpsim.launch.jobs import JobFailed, on_ranks
from dpsim.launch.scratch import scratch
from dpsim.learning_rate import Cosine, RateSchedule, Step
from dpsim.optimizer import AdamW, Sgd
from dpsim.progress import Progress
from dpsim.runtime.checkpoint import checkpoints

if TYPE_CHECKING:
    from mpi4py import MPI

_WARMING_UP = RateSchedule(warmup_epochs=2.0, decay=Cosine())
_COMMON: dict[str, Any] = {
    "dataset": "synthetic:6x5x2,classes=3,train=45,test=31",
    "steps": 48,
    "seed": 3,
    "leaves": 8,
    "checkpoint": "unused",
}
TRAININGS = (
    TrainConfig(
        model="mlp:9,8,dropout=0.2",
        global_batch=20,
        optimizer=AdamW(),
        rate_schedule=_WARMING_UP,
        checkpoint_every=3,
        **_COMMON,
    ),
    TrainConfig(
        model="cnn:4,6",
        batch_norm="leaf",
        global_batch=20,
        checkpoint_every=4,
        optimizer=Sgd(learning_rate=0.05, momentum=0.9, nesterov=True),
        rate_schedule=RateSchedule(decay=Step(milestones=(3.0,))),
        **_COMMON,
    ),
    TrainConfig(
        model="cnn:4",
        batch_norm="global",
        global_batch=13,
        optimizer=AdamW(),
        checkpoint_every=5,
        **_COMMON,
    ),
    TrainConfig(
        model="cnn:4,norm=group,dropout=0.3",
        global_batch=9,
        optimizer=Sgd(weight_decay=0.01),
        rate_schedule=_WARMING_UP,
        checkpoint_every=7,
        **_COMMON,
    ),
)
"""Runs of some epochs, whose last batches are short; nowhere do leaves divide the batch."""

_WAYS: dict[str, Sequence[Any]] = {
    "devices": (1, 2, 3, 4),
    "elastic": (True, False),
    "fusion_threshold_bytes": (None, 0.0, 300.0, float("inf")),
    "overlap": ("off", "inline", "poll", "thread"),
    "algorithm": ("auto", "direct", "ring"),
}
_STARTING_S, _STEPPING_S, _GONE_WITHIN_S = 1.0, 0.02, 10.0

Result = tuple[str, Sequence[float]]
"""Digest and losses."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What rounds came to: kills, ranks that they hit, kills after a checkpoint, runs that went on by themselves."""

    kills: int = 0
    ranks: int = 0
    trained: int = 0
    restarts: int = 0

    def __add__(self, other: Told) -> Told:
        return Told(
            kills=self.kills + other.kills,
            ranks=self.ranks + other.ranks,
            trained=self.trained + other.trained,
            restarts=self.restarts + other.restarts,
        )


def undisturbed(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Result]:
    """A task for one rank: what each training comes to that nothing happens to."""
    from dpsim.harness.train.on_ranks import train_on_ranks

    configs = [config | {"checkpoint_every": None, "checkpoint": None} for config in argument["trainings"]]
    results = [train_on_ranks(comm, {"config": config}, report) or {} for config in configs]
    return [(result["digest"], result["losses"]) for result in results]


class _Killer:
    """Ends ``ranks`` processes of the first job that this process starts, once that has written step ``aim``."""

    def __init__(self, ranks: int, aim: int, delay_s: float, moments: random.Random) -> None:
        self._ranks, self._aim, self._delay_s, self._moments = ranks, aim, delay_s, moments
        self._reached, self._over = threading.Event(), False
        self._met: list[psutil.Process] = []
        self._step = self._killed = self._restarts = 0
        if not aim:
            self._reached.set()

    def progress(self, text: str) -> None:
        """One line of the run's."""
        self._restarts += "; going on from" in text
        if match := re.match(r"checkpoint of step (\d+):", text):
            self._step = int(match[1])
            if self._step >= self._aim:
                self._reached.set()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Kills while the run in this block goes on. Raises ``AssertionError`` if it leaves a process behind."""
        thread = threading.Thread(target=self._kill)
        thread.start()
        try:
            yield
        finally:
            self._over = True
            self._reached.set()
            thread.join()
        until = time.monotonic() + _GONE_WITHIN_S
        while left := [one for one in self._met if _runs(one)]:
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.01)

    def _kill(self) -> None:
        self._reached.wait()
        time.sleep(self._delay_s)
        while self._ranks and not self._over and not self._killed:
            self._met = _workers_of_this_process()
            ranks = [one for one in self._met if not _children(one)]
            for rank in self._moments.sample(ranks, min(self._ranks, len(ranks))):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
                    self._killed += 1
            time.sleep(0.01)

    def told(self) -> Told:
        return Told(
            kills=self._killed > 0,
            ranks=self._killed,
            trained=self._killed > 0 and self._aim > 0,
            restarts=self._restarts,
        )


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children())
    return []


def _workers_of_this_process() -> list[psutil.Process]:
    """The ranks of the job that this process has started, and the parents that watch them."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if one.cmdline()[:1] == [sys.executable] and "dpsim.launch.worker" in one.cmdline():
                found.append(one)
    return found


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def kill_round(training: TrainConfig, expected: Result, seed: str, folder: Path) -> Told:
    """One run, killed once or twice. Raises ``AssertionError`` where it does not end as ``expected``."""
    moments, told, result = random.Random(seed), Told(), None
    config = msgspec.structs.replace(training, checkpoint=str(folder), **_way(moments))
    kills = moments.choice((1, 1, 2))
    while result is None:
        aim = moments.choice((0, moments.randint(1, training.steps or 1)))
        ranks = moments.choice((1, 1, 2)) if told.kills < kills else 0
        killer = _Killer(ranks, aim, moments.uniform(0, _STEPPING_S if aim else _STARTING_S), moments)
        try:
            with killer.at_work():
                result = train(config, killer.progress)
        except JobFailed as failed:
            if not failed.lost:
                raise
            config = _by_hand(config, moments, folder)
        told += killer.told()
    assert (result.digest, result.losses) == (expected[0], tuple(expected[1])), f"{config}: other bits"
    left = [path.name for path in folder.iterdir() if path not in [found for _, found in checkpoints(folder)]]
    assert not left, f"{config}: {left} are left behind"
    return told


def _way(moments: random.Random) -> dict[str, Any]:
    """How a run is run; nothing of what it comes to depends on that."""
    return {name: moments.choice(values) for name, values in _WAYS.items()}


def _by_hand(config: TrainConfig, moments: random.Random, folder: Path) -> TrainConfig:
    """The run resumed in another way from its last checkpoint; begun once more while there is none."""
    if not checkpoints(folder):
        return msgspec.structs.replace(config, **_way(moments))
    return configured(folder, _way(moments), None, {}, {}, lambda _: None)


def kill_rounds(rounds: int, seed: int, folder: Path) -> Told:
    """So many rounds, each in a folder of its own under ``folder``."""
    argument = {"trainings": [dict(codec.to_builtins(one)) for one in TRAININGS[:rounds]]}
    expected = on_ranks("dpsim.experiments.stress.kill_resume:undisturbed", argument, devices=1)
    told = Told()
    for number in range(rounds):
        which = number % len(TRAININGS)
        told += kill_round(TRAININGS[which], expected[which], f"{seed} {number}", folder / str(number))
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with scratch("kill") as folder:
        begin_s = time.monotonic()
        told = kill_rounds(asked.rounds, asked.seed, folder)
        took_s = time.monotonic() - begin_s
    print(f"{asked.rounds} runs in {took_s:.0f} s, {told.kills} kills of {told.ranks} ranks;", end=" ")
    print(f"{told.trained} after a checkpoint, {told.restarts} gone on from by themselves; all ended in the same bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
