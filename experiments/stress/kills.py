"""Attacks dpsim and counts what goes wrong.

``python -m dpsim.experiments.stress.kills [--parts kills,readers,...] [--cases 50] [--seed 0] [--output FOLDER]``.
Signals go to 200 processes of all kinds of commands at random moments: every command must end, leave nothing, name the
cause, and change no file of the user's. A process may be stopped instead; then its launcher is killed, as a user would.
What ignores a signal goes on, and its launcher is told to end. The other parts are property tests, run with many cases:
damaged inputs of all readers (20,000), damaged command lines (1,000), killed writers of checkpoints (1,000) and killed
trainings (200). With ``--output`` the counts of the kills are kept there as JSON, from which they continue. Exits with
1 if anything went wrong.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dpsim.experiments.command import ROOT
from dpsim.experiments.stress.running import GONE_WITHIN_S, Run
from dpsim.experiments.stress.tally import Outcome, Part, by_hypothesis, main
from dpsim.launch import scratch_keeper
from dpsim.launch.shaped import switch
from dpsim.runtime.checkpoint import checkpoints
from dpsim.study.runners.allreduce import turns

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
_GOES_ON_S, _REPORTS_S, _CONTINUES_S = 3.0, 100.0, 900.0
_SCRIPTS = ("dpsim.torch.script.probe.run_script", turns.__file__)
_NEXT = "from dpsim.launch.scratch import scratch\nwith scratch('next'): pass"
_DIGEST = re.compile(r"digest of the parameters (\w+)")
_RANKS = ("launcher", "keeper", "mpiexec", "proxy", "rank")
_DECLARED: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Command:
    """A command of ``python -m``, the kinds of its processes, and about how long it runs: signals come meanwhile.

    ``trains``: it writes checkpoints, from which ``train --resume`` continues. ``elastic``: it goes on by itself when
    a rank is killed. ``predictions``: the file that the same command, given again, keeps and continues from. ``slow``:
    it takes long, and gets fewer signals.
    """

    line: str
    usual_s: float
    kinds: Sequence[str] = _RANKS
    trains: bool = False
    elastic: bool = False
    predictions: str = ""
    slow: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.line.format(root=ROOT, python=sys.executable).split())

    def again(self, folder: Path) -> tuple[str, ...]:
        """Return the words of the command that continues in its folder; none where nothing can be continued."""
        if self.trains and (folder / "run").exists() and checkpoints(folder / "run"):
            return ("dpsim", "train", "--resume", "run")
        return self.words if self.trains or self.predictions else ()


COMMANDS = {name: Command(**fields) for name, fields in _DECLARED["commands"].items()}
TURNS = tuple(name for _ in range(3) for name in COMMANDS if not COMMANDS[name].slow) + tuple(
    name for name in COMMANDS if COMMANDS[name].slow
)


def prepare(folder: Path) -> None:
    """Write the scripts that the commands name into their folder."""
    for name, text in _DECLARED["scripts"].items():
        (folder / name).write_text(text, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A signal to the first process of a kind that a command has after so many seconds, or then gets."""

    command: str
    kind: str
    number: signal.Signals
    after_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.command}: {self.number.name} to {self.kind} from {self.after_s:.2f} s on"


class _Run(Run):
    """One run of a command whose processes get a signal.

    ``rank`` got it, ``ignores`` says whether it is ignored, and ``said`` is what the command had printed before.
    """

    rank = -1
    ignores = False
    said = ""

    def __init__(self, command: Command, marked: Path) -> None:
        super().__init__(marked)
        self.command = command
        prepare(self.folder)
        self.start(command.words)

    def alive(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield the processes of the command, each with what it is to it."""
        for pid in self.processes():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                yield _kind(process, self.process.pid), process

    def hit(self, attack: Attack) -> bool:
        """Send the signal; False where the command ended before it had such a process."""
        time.sleep(attack.after_s)
        while self.process.poll() is None:
            for process in [process for kind, process in self.alive() if kind == attack.kind]:
                with contextlib.suppress(psutil.Error, FileNotFoundError):
                    self.rank = int(process.environ().get("PMI_RANK", -1))
                    self.ignores, self.said = _ignores(process.pid, attack), self.text()
                    process.send_signal(attack.number)
                    return True
        return False

    def wait(self) -> int:
        """Return the exit code, if the command ends in time, or its ranks and scripts do. Raises ``TimeoutExpired``."""
        try:
            return self.process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            if {kind for kind, _ in self.alive()} - {"launcher", "keeper", "job", ""}:
                raise
        return self.process.wait(_REPORTS_S)

    def job_ends(self) -> None:
        """Wait for the end of a watched job, which goes on whatever happens to the command."""
        until = time.monotonic() + _CONTINUES_S
        while time.monotonic() < until and "job" in {kind for kind, _ in self.alive()}:
            time.sleep(0.1)

    def predictions(self) -> bytes:
        """Return the file that the command must not write again; empty where there is none."""
        path = self.folder / self.command.predictions
        return path.read_bytes() if self.command.predictions and path.exists() else b""


def _kind(process: psutil.Process, launcher: int) -> str:
    """Return what a process is to the command; empty for a shell, and for what is no program of its own yet."""
    words = process.cmdline()
    if process.pid == launcher:
        return "launcher"
    if process.name() == "mpiexec":
        return "mpiexec" if "dpsim.launch.worker" in words else ""
    if process.name().startswith("hydra"):  # that of a benchmark's other systems has another starter
        return "proxy" if "dpsim.launch.worker" in psutil.Process(process.ppid()).cmdline() else ""
    if words[:1] != [sys.executable]:
        return ""
    if scratch_keeper.__file__ in words:
        return "keeper"
    if switch.__file__ in words:
        return "flow" if "--send" in words else "switch"
    if "dpsim.launch.worker" in words:
        return "watcher" if process.children() else "rank"
    if words[1:] == ["job.py"]:
        return "job"
    if any("multiprocessing.spawn" in word for word in words):
        return "worker"
    return "script" if any(word in words for word in _SCRIPTS) else ""


def _ignores(pid: int, attack: Attack) -> bool:
    """Return whether the process ignores the signal. Hydra's proxies wait for the ranks after INT and TERM."""
    if attack.kind == "proxy":
        return attack.number in (signal.SIGINT, signal.SIGTERM)
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    (ignored,) = re.findall(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)
    return bool(int(ignored, 16) >> (attack.number - 1) & 1)


@functools.cache
def _digest(folder: Path) -> str:
    """Return the digest in which every training ends that nobody disturbs."""
    run = _Run(COMMANDS["train"], folder / "undisturbed")
    run.process.wait()
    return str(_DIGEST.findall(run.text())[-1])


def outcome(attack: Attack, folder: Path, case: str) -> Outcome:
    """Make one attack, in a folder of its own."""
    expected = _digest(folder) if COMMANDS[attack.command].trains else ""
    run = _Run(COMMANDS[attack.command], folder / case)
    try:
        became, wrong = _judged(run, attack, expected)
    finally:
        run.end()
    if wrong:
        wrong += f"; it said {run.text()[-600:]!r}"
    return Outcome(case=f"{case}: {attack.name}", became=f"{attack.command}: {became}", wrong=wrong)


def _judged(run: _Run, attack: Attack, digest: str) -> tuple[str, str]:
    """Return what became of the command, and what is wrong with that."""
    if not run.hit(attack):
        if "shaped hosts cannot be made here" in run.text():
            return "cannot run here", run.left()
        return "had ended", "" if run.process.returncode == 0 else f"exit code {run.process.returncode}"
    became = _ended(run, attack)
    run.job_ends()
    if attack.kind == "keeper" and attack.number == signal.SIGSTOP:
        subprocess.run([sys.executable, "-c", _NEXT], env=run.environment | {"DPSIM_FOLDER": ""}, check=True)
    if wrong := run.left():
        return became, wrong
    early = f"{ROOT}/dpsim" not in run.text() and attack.kind == "launcher"  # in Python's own start
    if not early and (wrong := run.traceback()):
        return became, wrong
    if became == "went on by itself":
        ended_well = run.process.returncode == 0 and digest in run.text()
        return became, "" if ended_well else f"it ended with exit code {run.process.returncode}"
    if became == "ended" and not early and (wrong := _misnamed(run, attack)):
        return became, wrong
    kept = run.predictions()
    if words := run.command.again(run.folder):
        became += " and continued"
        run.start(words)
        if (code := run.process.wait(_CONTINUES_S)) != 0:
            return became, f"exit code {code} when continued"
        if digest and digest not in run.text():
            return became, "another digest when continued"
        if kept and kept != run.predictions():
            return became, "the predictions were made again when it continued"
        return became, run.left()
    return became, ""


def _ended(run: _Run, attack: Attack) -> str:
    """Wait until the command has ended, or had the time to; end it where it rightly goes on; what became of it."""
    elastic = run.command.elastic and attack.kind in ("rank", "watcher") and attack.number == signal.SIGKILL
    with contextlib.suppress(subprocess.TimeoutExpired):
        if run.ignores or attack.kind == "keeper" or attack.number == signal.SIGSTOP:
            run.process.wait(_GOES_ON_S)
            return "had ended"
        code = run.process.wait(_CONTINUES_S) if elastic else run.wait()
        done = code == 0 and attack.kind != "launcher"  # its ranks were ready, or mpiexec had none yet
        return "went on by itself" if elastic or done else "ended"
    if attack.number == signal.SIGSTOP:
        run.process.kill()
        return "stopped"
    if run.ignores or attack.kind == "keeper":
        run.process.terminate()
        return "ignored"
    if run.text() != run.said:  # the ranks were done, and the command does what comes next
        with contextlib.suppress(subprocess.TimeoutExpired):
            if run.process.wait(_CONTINUES_S) == 0:
                return "went on by itself"
    return "hung"


def _misnamed(run: _Run, attack: Attack) -> str:
    """Say what is wrong with a run's exit code and last message; empty where they tell of the signal."""
    code, name = run.process.returncode, attack.number.name
    if attack.kind == "launcher":
        right = {-attack.number, 128 + attack.number}
        return "" if code in right else f"exit code {code} instead of {right}"
    last = re.split(r"^(?=dpsim: )", run.text(), flags=re.MULTILINE)[-1]
    rank = rf"(rank {run.rank} of \d|ranks [^:]*\b{run.rank}\b[^:]* of \d|one of \d ranks)"
    expected = {
        "rank": rf"{rank} (was|were) killed by {name}",
        "watcher": rf"{rank} (was|were) killed by (SIGKILL|{name})",
        "mpiexec": rf"(mpiexec|one of \d ranks|ranks? .*) (was|were) killed by {name}",  # it hands on all but SIGKILL
        "proxy": r"hydra_pmi_proxy",
        "switch": rf"the process that holds the hosts of the shaped network \(\d+\) was killed by {name}",
        "flow": r"the process that sends the flow in the background has ended",
        "worker": r"the executor failed",
        "script": rf"{name}|signal {attack.number:d}\b",
    }[attack.kind]
    return "" if code in (1, 2) and re.search(expected, last) else f"it is not told, exit code {code}"


def drawn(number: int, seed: int, name: str = "") -> Attack:
    """Draw an attack on a command, or on that whose turn it is."""
    moments = random.Random(f"{seed} {number}")
    name = name or TURNS[number % len(TURNS)]
    command = COMMANDS[name]
    return Attack(
        command=name,
        kind=moments.choice(command.kinds),
        number=moments.choice(_SIGNALS),
        after_s=moments.uniform(0, command.usual_s),
    )


def run(first: int, last: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """Attack one command after another."""
    for number in range(first, last):
        yield outcome(drawn(number, seed), folder, str(number))


PARTS = {
    "kills": Part(run, 200),
    "readers": Part(by_hypothesis("tests/test_readers.py"), 20_000, continues=False),
    "commands": Part(by_hypothesis("tests/cli/test_damaged_commands.py"), 1_000, continues=False),
    "checkpoints": Part(by_hypothesis("tests/runtime/test_killed_writer.py"), 1_000, continues=False),
    "trainings": Part(by_hypothesis("tests/runtime/test_killed_training.py"), 200, continues=False),
}

if __name__ == "__main__":
    sys.exit(main("kills", __doc__, PARTS))
