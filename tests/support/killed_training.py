"""Trainings whose ranks are killed at random moments; they continue by themselves or are resumed on other devices."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from dpsim.experiments.stress.running import GONE_WITHIN_S
from dpsim.harness.train.resume import configured
from dpsim.harness.train.train import train
from dpsim.launch.jobs import JobFailed
from dpsim.learning_rate import Cosine, RateSchedule, Step
from dpsim.optimizer import AdamW, Sgd
from dpsim.progress import Progress
from dpsim.records.train import TrainConfig
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
    TrainConfig.of(
        model="mlp:9,8,dropout=0.2",
        global_batch=20,
        optimizer=AdamW(),
        rate_schedule=_WARMING_UP,
        checkpoint_every=3,
        **_COMMON,
    ),
    TrainConfig.of(
        model="cnn:4,6",
        batch_norm="leaf",
        global_batch=20,
        checkpoint_every=4,
        optimizer=Sgd(learning_rate=0.05, momentum=0.9, nesterov=True),
        rate_schedule=RateSchedule(decay=Step(milestones=(3.0,))),
        **_COMMON,
    ),
    TrainConfig.of(
        model="cnn:4",
        batch_norm="global",
        global_batch=13,
        optimizer=AdamW(),
        checkpoint_every=5,
        **_COMMON,
    ),
    TrainConfig.of(
        model="cnn:4,norm=group,dropout=0.3",
        global_batch=9,
        optimizer=Sgd(weight_decay=0.01),
        rate_schedule=_WARMING_UP,
        checkpoint_every=7,
        **_COMMON,
    ),
)
"""Runs of several epochs whose last batches are short; the number of leaves never divides the batch."""

_SETTINGS: dict[str, Sequence[Any]] = {
    "devices": (1, 2, 3, 4),
    "elastic": (True, False),
    "fusion_threshold_bytes": (None, 0.0, 300.0, float("inf")),
    "overlap": ("off", "inline", "poll", "thread"),
    "algorithm": ("auto", "direct", "ring"),
}
_STARTING_S, _STEPPING_S = 1.0, 0.02

Result = tuple[str, Sequence[float]]
"""Digest and losses."""


def undisturbed(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Result]:
    """Return the result of each training when nothing is killed: a task for one rank."""
    from dpsim.harness.train.on_ranks import train_on_ranks

    configs = [config | {"checkpoint_every": None, "checkpoint": None} for config in argument["trainings"]]
    results = [train_on_ranks(comm, {"config": config}, report) or {} for config in configs]
    return [(result["digest"], result["losses"]) for result in results]


class _Killer:
    """Kills ``ranks`` processes of the first job that this process starts, once it has written step ``aim``."""

    def __init__(self, ranks: int, aim: int, delay_s: float, moments: random.Random) -> None:
        self._ranks, self._aim, self._delay_s, self._moments = ranks, aim, delay_s, moments
        self._reached, self._over = threading.Event(), False
        self._workers: list[psutil.Process] = []
        self._step = self._killed = self._restarts = 0
        if not aim:
            self._reached.set()

    def progress(self, text: str) -> None:
        """Take one line of the run's progress."""
        self._restarts += "; going on from" in text
        if match := re.match(r"checkpoint of step (\d+):", text):
            self._step = int(match[1])
            if self._step >= self._aim:
                self._reached.set()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Kill while the run in this block is at work."""
        thread = threading.Thread(target=self._kill)
        thread.start()
        try:
            yield
        finally:
            self._over = True
            self._reached.set()
            thread.join()

    def left_behind(self) -> str:
        """Say which processes of the run still are there though it has ended; empty: none."""
        until = time.monotonic() + GONE_WITHIN_S
        while left := [process for process in self._workers if _is_running(process)]:
            if time.monotonic() > until:
                return f"left behind: {left}"
            time.sleep(0.01)
        return ""

    def _kill(self) -> None:
        self._reached.wait()
        time.sleep(self._delay_s)
        while self._ranks and not self._over and not self._killed:
            self._workers = _workers_of_this_process()
            ranks = [process for process in self._workers if not _children(process)]
            for rank in self._moments.sample(ranks, min(self._ranks, len(ranks))):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
                    self._killed += 1
            time.sleep(0.01)

    @property
    def became(self) -> str:
        """What it did to the run; empty for nothing."""
        if not self._killed:
            return ""
        continued = ", which continued by itself" if self._restarts else ""
        return f"{self._killed} killed {'after' if self._aim else 'before'} a checkpoint{continued}"


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process exists and has not ended."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(process.children())
    return []


def _workers_of_this_process() -> list[psutil.Process]:
    """Return the ranks of the job that this process has started, and the parents that watch them."""
    workers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if command[:1] == [sys.executable] and "dpsim.launch.worker" in command:
                workers.append(process)
    return workers


class Ended(NamedTuple):
    """A training that was killed: its result, what the kills were, and the processes and files that are left of it."""

    result: Result
    kills: str
    left: str


def killed_training(training: TrainConfig, seed: str, folder: Path) -> Ended:
    """Train once, killed once or twice at moments that follow from ``seed``, to the end."""
    moments, kills, left = random.Random(seed), list[str](), ""
    config = training.changed(checkpoint=str(folder), **_drawn(moments))
    most, result = moments.choice((1, 1, 2)), None
    while result is None:
        aim = moments.choice((0, moments.randint(1, training.steps or 1)))
        ranks = moments.choice((1, 1, 2)) if len(kills) < most else 0
        killer = _Killer(ranks, aim, moments.uniform(0, _STEPPING_S if aim else _STARTING_S), moments)
        try:
            with killer.at_work():
                result = train(config, killer.progress)
        except JobFailed as failed:
            if not failed.lost:
                raise
            config = _by_hand(config, moments, folder)
        kills += [killer.became] if killer.became else []
        left = left or killer.left_behind()
    whole = [path for _, path in checkpoints(folder)]
    files = [path.name for path in folder.iterdir() if path not in whole]
    return Ended((result.digest, result.losses), "; ".join(kills) or "had ended", left or ", ".join(files))


def _drawn(moments: random.Random) -> dict[str, Any]:
    """Draw settings at random on which the results of a reproducible run do not depend."""
    return {name: moments.choice(values) for name, values in _SETTINGS.items()}


def _by_hand(config: TrainConfig, moments: random.Random, folder: Path) -> TrainConfig:
    """Return the run with other settings, resumed from its last checkpoint, or begun anew while there is none."""
    if not checkpoints(folder):
        return config.changed(**_drawn(moments))
    return configured(folder, _drawn(moments), None, {}, {}, lambda _: None)
