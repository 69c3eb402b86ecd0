"""Sends signals to processes of all commands at random moments: all must end, leave nothing and name the cause.

A process may be stopped instead; then its launcher is killed, as a user would. What ignores a signal goes on, and its
launcher is told to end.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from dpsim.experiments.stress.hostile import user_files
from dpsim.experiments.stress.hostile.killed_commands import COMMANDS, TURNS, Command, in_python, prepare
from dpsim.experiments.stress.hostile.tally import Outcome
from dpsim.harness.bench import turns
from dpsim.launch import scratch, scratch_keeper

_ROOT = str(Path(str(importlib.resources.files("dpsim"))).resolve().parent)
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
_GOES_ON_S, _GONE_WITHIN_S, _REPORTS_S, _CONTINUES_S = 3.0, 10.0, 100.0, 900.0
_SHARED = "/dev/shm"
_OF_PYTORCH = "torchinductor_"
"""PyTorch's folder of compiled code, which it keeps."""
_SCRIPTS = ("dpsim.torch_ddp.run_script", turns.__file__)
_NEXT = "from dpsim.launch.scratch import scratch\nwith scratch('next'): pass"
_DIGEST = re.compile(r"digest of the parameters (\w+)")


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


@dataclass(frozen=True, kw_only=True)
class _Hit:
    """What got the signal, whether it ``ignores`` that, and what the command had ``said`` before."""

    rank: int | None
    ignores: bool
    said: str


class _Run:
    """One run of a command in folders of its own, where all of its processes can be told from others."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command, self.marked, self.folder, self.temporary = command, folder, folder / "w", folder / "t"
        for each in (self.marked, self.folder, self.temporary):
            each.mkdir()
        prepare(self.folder)
        user_files.add_notes(self.folder)
        self._files = user_files.contents(self.folder)
        self._before = {*os.listdir(_SHARED), *scratch_keeper.abandoned_topologies()}
        own = {"PYTHONPATH": _ROOT, "TMPDIR": str(self.temporary)} | scratch.environment(self.marked)
        self.environment = {**os.environ, **own}
        self._output = folder / "output.txt"
        self.process = self._started(command.words)

    def _started(self, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
        with self._output.open("wb") as output:
            return subprocess.Popen(
                in_python(words),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )

    def text(self) -> str:
        """All that the command has printed."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def restart(self, words: tuple[str, ...]) -> int:
        """Run another command in the same folders, to its end; its exit code."""
        self.process = self._started(words)
        return self.process.wait(_CONTINUES_S)

    def hit(self, attack: Attack) -> _Hit | None:
        """Send the signal; None where the command ended before it had such a process."""
        time.sleep(attack.after_s)
        while self.process.poll() is None:
            for pid in scratch_keeper.started_for(str(self.marked)):
                with contextlib.suppress(psutil.Error, FileNotFoundError):
                    process = psutil.Process(pid)
                    if _kind(process, self.process.pid) == attack.kind:
                        rank = int(process.environ().get("PMI_RANK", -1))
                        hit = _Hit(rank=rank, ignores=_ignores(pid, attack), said=self.text())
                        process.send_signal(attack.number)
                        return hit
        return None

    def wait(self) -> int:
        """The exit code, if the command ends in time, or its ranks and scripts do. Raises ``TimeoutExpired``."""
        try:
            return self.process.wait(_GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            for pid in scratch_keeper.started_for(str(self.marked)):
                with contextlib.suppress(psutil.Error):
                    if _kind(psutil.Process(pid), self.process.pid) not in ("launcher", "keeper", ""):
                        raise
        return self.process.wait(_REPORTS_S)

    def left(self) -> str:
        """What is left of the run though it should be gone, or which of the user's files changed; empty: nothing."""
        until = time.monotonic() + _GONE_WITHIN_S
        while True:
            self.process.poll()
            processes = scratch_keeper.started_for(str(self.marked))
            left = [_shown(pid) for pid in processes]
            left += [path.name for path in self.temporary.iterdir() if not path.name.startswith(_OF_PYTORCH)]
            left += sorted(_unused({*os.listdir(_SHARED), *scratch_keeper.abandoned_topologies()} - self._before))
            if not left:
                return user_files.changes(self._files, self.folder)
            if time.monotonic() > until:
                return f"left after {_GONE_WITHIN_S:.0f} s: {', '.join(left)}"
            time.sleep(0.05)


def _kind(process: psutil.Process, launcher: int) -> str:
    """What a process is to the command; empty for a shell, and for what has not become a program of its own yet."""
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
    if "dpsim.launch.worker" in words:
        return "watcher" if process.children() else "rank"
    return "script" if any(word in words for word in _SCRIPTS) else ""


def _ignores(pid: int, attack: Attack) -> bool:
    """Whether the process was told to ignore the signal. Hydra's proxies wait for the ranks after INT and TERM."""
    if attack.kind == "proxy":
        return attack.number in (signal.SIGINT, signal.SIGTERM)
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    (ignored,) = re.findall(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)
    return bool(int(ignored, 16) >> (attack.number - 1) & 1)


def _shown(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return f"{process.name()} ({process.status()}, {' '.join(process.cmdline()[-3:])[:80]})"
    return "a process"


def _unused(names: set[str]) -> set[str]:
    """Those of these files and folders that no process has open, mapped, or named in its environment."""
    for pid in psutil.pids() if names else ():
        seen = ""
        for file in ("environ", "maps"):
            with contextlib.suppress(OSError):
                seen += Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
        for descriptor in scratch_keeper.entries(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                seen += os.readlink(descriptor.path)
        names = {name for name in names if name not in seen}
    return names


@functools.cache
def _digest(folder: Path) -> str:
    """The digest in which every training ends that nobody disturbs."""
    run = _Run(COMMANDS["train"], folder / "undisturbed")
    run.process.wait()
    return str(_DIGEST.findall(run.text())[-1])


def outcome(attack: Attack, folder: Path, case: str) -> Outcome:
    """What became of one attack, in a folder of its own."""
    expected = _digest(folder) if COMMANDS[attack.command].trains else ""
    run = _Run(COMMANDS[attack.command], folder / case)
    try:
        became, wrong = _judged(run, attack, expected)
    finally:
        scratch_keeper.end_processes(str(run.marked))
        run.process.wait()
    if wrong:
        wrong += f"; it said {run.text()[-600:]!r}"
    return Outcome(case=f"{case}: {attack.name}", became=f"{attack.command}: {became}", wrong=wrong)


def _judged(run: _Run, attack: Attack, digest: str) -> tuple[str, str]:
    """(what became of the command, what is wrong with that)."""
    hit = run.hit(attack)
    if hit is None:
        return "had ended", "" if run.process.returncode == 0 else f"exit code {run.process.returncode}"
    became = _ended(run, attack, hit)
    if attack.kind == "keeper" and attack.number == signal.SIGSTOP:
        subprocess.run([sys.executable, "-c", _NEXT], env=run.environment | {"DPSIM_FOLDER": ""}, check=True)
    if wrong := run.left():
        return became, wrong
    early = f"{_ROOT}/dpsim" not in run.text() and attack.kind == "launcher"  # in Python's own start
    if "Traceback (most recent call last)" in run.text() and not early:
        return became, "a traceback"
    if became == "went on by itself":
        ended_well = run.process.returncode == 0 and digest in run.text()
        return became, "" if ended_well else f"it ended with exit code {run.process.returncode}"
    if became == "ended" and not early and (wrong := _misnamed(run, attack, hit)):
        return became, wrong
    kept = _content(run)
    if words := run.command.again(run.folder):
        became += " and continued"
        if (code := run.restart(words)) != 0:
            return became, f"exit code {code} when continued"
        if digest and digest not in run.text():
            return became, "another digest when continued"
        if kept and kept != _content(run):
            return became, "the predictions were made again when it continued"
        return became, run.left()
    return became, ""


def _ended(run: _Run, attack: Attack, hit: _Hit) -> str:
    """Wait until the command has ended, or had the time to; end it where it is right to go on. What became of it."""
    elastic = run.command.elastic and attack.kind in ("rank", "watcher") and attack.number == signal.SIGKILL
    with contextlib.suppress(subprocess.TimeoutExpired):
        if hit.ignores or attack.kind == "keeper" or attack.number == signal.SIGSTOP:
            run.process.wait(_GOES_ON_S)
            return "had ended"
        code = run.process.wait(_CONTINUES_S) if elastic else run.wait()
        done = code == 0 and attack.kind != "launcher"  # its ranks were ready, or mpiexec had none yet
        return "went on by itself" if elastic or done else "ended"
    if attack.number == signal.SIGSTOP:
        run.process.kill()
        return "stopped"
    if hit.ignores or attack.kind == "keeper":
        run.process.terminate()
        return "ignored"
    if run.text() != hit.said:  # the ranks were done, and the command does what comes next
        with contextlib.suppress(subprocess.TimeoutExpired):
            if run.process.wait(_CONTINUES_S) == 0:
                return "went on by itself"
    return "hung"


def _misnamed(run: _Run, attack: Attack, hit: _Hit) -> str:
    """What is wrong with a run's exit code and last message; empty where they tell of the signal."""
    code, name = run.process.returncode, attack.number.name
    if attack.kind == "launcher":
        right = {-attack.number, 128 + attack.number}
        return "" if code in right else f"exit code {code} instead of {right}"
    last = re.split(r"^(?=dpsim: )", run.text(), flags=re.MULTILINE)[-1]
    rank = rf"(rank {hit.rank} of \d|ranks [^:]*\b{hit.rank}\b[^:]* of \d|one of \d ranks)"
    expected = {
        "rank": rf"{rank} (was|were) killed by {name}",
        "watcher": rf"{rank} (was|were) killed by (SIGKILL|{name})",
        "mpiexec": rf"(mpiexec|one of \d ranks|ranks? .*) (was|were) killed by {name}",  # it hands on all but SIGKILL
        "proxy": r"hydra_pmi_proxy",
        "script": rf"{name}|signal {attack.number:d}\b",
    }[attack.kind]
    return "" if code in (1, 2) and re.search(expected, last) else f"it is not told, exit code {code}"


def _content(run: _Run) -> bytes:
    path = run.folder / run.command.predictions
    return path.read_bytes() if run.command.predictions and path.exists() else b""


def drawn(number: int, seed: int) -> Attack:
    """A random attack on the command whose turn it is."""
    moments = random.Random(f"{seed} {number}")
    name = TURNS[number % len(TURNS)]
    command = COMMANDS[name]
    return Attack(
        command=name,
        kind=moments.choice(command.kinds),
        number=moments.choice(_SIGNALS),
        after_s=moments.uniform(0, command.usual_s),
    )


def run(first: int, last: int, seed: int, folder: Path, add: Callable[[Outcome], None]) -> None:
    """Cases ``first`` to ``last``."""
    for number in range(first, last):
        add(outcome(drawn(number, seed), folder, str(number)))
