"""``assert_same_training``: a training with PyTorch's DDP or FSDP, tested on several numbers of devices, by pytest.

``dpsim reproduce`` compares the runs, in a process and an environment of its own. This file loads the standard library
alone, for Python 3.9 and newer: the wheel ``dpsim-pytest`` brings it into the environment of the job.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is loaded where it is needed: pytest imports this file whenever it starts
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

__all__ = ["TrainingDiffers", "assert_same_training"]

MARKER, UPDATE = "same_training", "--dpsim-update"
BASELINES = "dpsim_baselines"
"""The folder beside a test's file with the baselines of its tests."""
_GRACE_S = 10.0
"""How long ``dpsim`` may take to end its ranks."""
_INSTALL = (
    "in the folder of dpsim's repository, make dist prints the line that installs it into an environment of its own;"
    " then put its folder bin on PATH, or name its Python by DPSIM_PYTHON"
)
_COMPARABLE = (
    "  allowed: the same samples, and the same random numbers, on any number of devices\n"
    "  to do:   seed what draws them, and let each rank take its part of one global batch\n"
)
_session: dict[str, Any] = {"item": None, "update": False}
"""The test that runs now, and whether baselines are written."""


class TrainingDiffers(AssertionError):
    """The training is not the same in two runs, or they cannot be compared. Its text is that of ``dpsim reproduce``."""


def assert_same_training(
    training: str | Callable[[], Any],
    *arguments: str,
    devices: Sequence[int] = (1, 2, 4),
    accumulate: Sequence[int] = (),
    bucket_caps: Sequence[str | int] = (),
    resume_on: int | None = None,
    dtype: str = "float32",
    steps: int = 8,
    timeout_s: float = 300.0,
    may_write: bool = False,
) -> None:
    """Train on each number of devices with the same global batches, and compare losses and gradients step by step.

    ``training`` is the path of a script, with its ``arguments``; a module as ``python -m`` takes it; or a function that
    runs the training loop: the ranks import its file and call it by name, without arguments. The first of ``devices``
    is held as right. ``accumulate`` are numbers of micro-batches (``{accumulate}`` in an argument stands for them) and
    ``bucket_caps`` sizes of DDP's buckets, such as ``"25MiB"``. With ``resume_on`` it is also started on the last of
    ``devices``, ended after a checkpoint and resumed on that number. Under ``dtype`` ``bfloat16`` it computes with
    autocast. It may change the user's files if it ``may_write``.

    If this test has a baseline, which pytest writes with ``--dpsim-update``, the losses of the first run must be those
    of the baseline within rounding, and its bits too in an equal environment.

    Raises ``TrainingDiffers`` for a mistake, for runs that cannot be compared, and for a training that does not work or
    takes longer than ``timeout_s`` seconds.
    """
    __tracebackhide__ = True
    program = _program(training)
    axes = ["--devices", _listed(devices), "--accumulate", _listed(accumulate)][: 4 if accumulate else 2]
    axes += ["--bucket-cap", _listed(bucket_caps)] if bucket_caps else []
    axes += ["--set", f"compute_dtype={dtype}"] if dtype != "float32" else []
    common = [*_dpsim(), "reproduce", "--torch-script", program, "--python", sys.executable, "--steps", str(steps)]
    common += ["--json", *(["--script-may-write"] if may_write else [])]
    baseline = _baseline()
    answer = _answer([*common, *axes, *baseline, "--", *arguments], max(devices), timeout_s)
    summary = answer["summary"]
    if (item := _session["item"]) is not None:
        item.user_properties.append(("dpsim", {"program": program, **answer}))
    if _fails(answer):
        remedy = _COMPARABLE if not summary["comparable"] else ""
        remedy += (
            f"  to do:   undo what changed it, or pytest {UPDATE}\n" if summary.get("differs_from_baseline") else ""
        )
        raise TrainingDiffers("\n" + summary["text"] + remedy)
    if resume_on is not None:
        resumed = ["--devices", str(devices[-1]), "--resume-on", str(resume_on), "--", *arguments]
        answer = _answer([*common, *resumed], max(devices[-1], resume_on), timeout_s)
        if answer["code"]:
            raise TrainingDiffers("\n" + answer["summary"]["text"])


def _fails(answer: dict[str, Any]) -> bool:
    """Whether there is a mistake, or the runs cannot be compared."""
    return bool(answer["code"]) or not answer["summary"]["comparable"]


def _listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


# What trains, and what compares.


def _program(training: str | Callable[[], Any]) -> str:
    """Return what ``--torch-script`` takes: a script, a module or ``FILE.py::FUNCTION``. Raises ``TrainingDiffers``."""
    __tracebackhide__ = True
    if isinstance(training, (str, os.PathLike)):
        path = os.fspath(training)
        item = _session["item"]
        beside = os.path.join(os.path.dirname(item.path), path) if item is not None else path
        return os.path.relpath(beside) if not os.path.exists(path) and os.path.exists(beside) else path
    import inspect

    name = getattr(training, "__qualname__", "")
    file = inspect.getsourcefile(training) if inspect.isfunction(training) else None
    if file is None or not name.isidentifier():
        raise TrainingDiffers(
            f"{name or training!r} cannot be imported in the ranks, which are other processes.\n"
            "  allowed: the path of a script; a function that a file defines at its top level (no lambda, closure or"
            " method)\n  to do:   move the training loop into such a function, which takes no arguments"
        )
    return f"{os.path.relpath(file)}::{name}"


def _dpsim() -> list[str]:
    """Return the command that starts dpsim: by ``DPSIM_PYTHON``, this environment, or PATH. Raises ``TrainingDiffers``.

    This environment may have no more of dpsim than this file.
    """
    __tracebackhide__ = True
    import importlib.util
    import shutil

    if python := os.environ.get("DPSIM_PYTHON"):
        return [python, "-m", "dpsim"]
    if importlib.util.find_spec("dpsim.cli") is not None:
        return [sys.executable, "-m", "dpsim"]
    if program := shutil.which("dpsim"):
        return [program]
    raise TrainingDiffers(
        f"dpsim, which compares the runs, is not on PATH.\n  allowed: dpsim in any environment of this machine\n"
        f"  to do:   {_INSTALL}"
    )


def _answer(command: list[str], ranks: int, timeout_s: float | None) -> dict[str, Any]:
    """Run dpsim once there are cores for its ranks; return its JSON object and its exit ``code``.

    Raises ``TrainingDiffers`` where it gives none. No process is left, however this ends.
    """
    __tracebackhide__ = True
    import json
    import subprocess

    variables = dict(os.environ)
    variables["DPSIM_FUNCTION_PATH"] = os.pathsep.join(_import_folders())
    with _cores(ranks):
        try:
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        except OSError as error:
            raise TrainingDiffers(f"{command[0]} does not start: {error.strerror}.\n  to do:   {_INSTALL}") from None
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            out, err = _ended(process)
            raise TrainingDiffers(
                f"The training had not ended after {timeout_s:g} s, and was ended.\n"
                "  allowed: steps that come to an end on every number of devices within timeout_s\n"
                f"  to do:   train less between two steps, or give a larger timeout_s{_tail(err)}"
            ) from None
        finally:
            _ended(process)
    try:
        answer: dict[str, Any] = json.loads(out)
        summary = {name: answer["summary"][name] for name in ("text", "verdict", "comparable")}
        return {**answer, "code": process.returncode, "summary": {**answer["summary"], **summary}}
    except (ValueError, KeyError, TypeError):
        text = err[err.index("dpsim: ") :] if "dpsim: " in err else f"{command[0]} gave no answer.{_tail(out + err)}"
        raise TrainingDiffers("\n" + text.rstrip()) from None


def _tail(text: str) -> str:
    lines = text.strip().splitlines()[-8:]
    return "\n  it printed last:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def _end_with_parent() -> None:
    """Let the kernel end this process, which becomes dpsim, when the one that runs the tests is killed."""
    import ctypes
    import signal

    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _ended(process: Any) -> tuple[str, str]:
    """End dpsim, which ends its ranks, and return what it has printed."""
    import contextlib
    import signal
    import subprocess

    if process.poll() is None:
        process.terminate()
        try:
            printed = process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            printed = process.communicate()
        return str(printed[0]), str(printed[1])
    return "", ""


def _import_folders() -> list[str]:
    """Return the folders from which the tests import beside those of their Python, such as pytest's ``pythonpath``."""
    own = tuple(os.path.realpath(each) + os.sep for each in {sys.prefix, sys.base_prefix})
    return [each for each in sys.path if os.path.isdir(each) and not os.path.realpath(each).startswith(own)]


def _cores(ranks: int) -> Any:
    """Return a context that holds as many of this machine's cores as there are ranks, or all of them.

    Tests that run beside each other, as under pytest-xdist, so take turns. A core is a lock on a file of this user's,
    which the kernel gives up when the process ends.
    """
    import contextlib
    import fcntl
    import tempfile
    import time

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        folder = os.path.join(tempfile.gettempdir(), f"dpsim-cores-{os.getuid()}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with contextlib.ExitStack() as files:

            def opened(name: str) -> Any:
                return files.enter_context(open(os.path.join(folder, name), "w"))

            free = [opened(f"core-{number}") for number in range(count)]
            with open(os.path.join(folder, "queue"), "w") as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)  # who has waited longest gets what becomes free
                while len(free) > count - min(ranks, count):
                    free = [file for file in free if not _locked(file)]
                    time.sleep(0.02)
            yield

    return held()


def _locked(file: Any) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _baseline() -> list[str]:
    """Return the flags for the baseline of the test that runs: none where it has none and none is to be written."""
    import zlib

    item = _session["item"]
    if item is None:
        return []
    file = os.path.relpath(str(item.path))
    full = item.nodeid.partition("::")[2].replace("::", ".")
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in full)
    if name != full:  # of a parameter; another one may differ in such letters alone
        name += f"-{zlib.crc32(full.encode()):08x}"
    written = sum(name == "dpsim" for name, _ in item.user_properties)
    stem = f"{os.path.splitext(os.path.basename(file))[0]}.{name}{f'-{written + 1}' if written else ''}.json"
    path = os.path.join(os.path.dirname(file), BASELINES, stem)
    if _session["update"]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return ["--output", path]
    return ["--against", path] if os.path.exists(path) else []


# What pytest calls.


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("dpsim", "training on several numbers of devices")
    group.addoption(
        UPDATE,
        action="store_true",
        help=f"write the baselines of assert_same_training anew, into the folder {BASELINES} beside each test",
    )


def pytest_configure(config: Any) -> None:
    _session["update"] = config.getoption(UPDATE)
    config.addinivalue_line(
        "markers",
        f"{MARKER}(devices=(1, 2, 4), **options): the test itself is a training, which must be the same on these"
        " numbers of devices: options of dpsim.testing.assert_same_training",
    )


def pytest_runtest_setup(item: Any) -> None:
    _session["item"] = item


def pytest_runtest_teardown(item: Any) -> None:
    _session["item"] = None


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Compare the training that a marked test is, in place of calling it."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return None
    assert_same_training(pyfuncitem.function, *marker.args, **marker.kwargs)
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say where bits were not compared with a baseline; tell GitHub Actions what all comparisons came to."""
    reports = [each for kind in terminalreporter.stats.values() for each in kind if getattr(each, "when", "") == "call"]
    answers = [value for each in reports for name, value in each.user_properties if name == "dpsim"]
    others = [each for each in answers if "not compared" in each["summary"].get("baseline", "")]
    for line in [f"dpsim: {each['program']}: {each['summary']['baseline']}" for each in others] + _github_lines(
        answers
    ):
        terminalreporter.write_line(line)


# What GitHub Actions shows.


def _github_lines(answers: Sequence[dict[str, Any]]) -> list[str]:
    """Add a table for each comparison to the summary of the job; return the lines that annotate the files."""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(path, "a", encoding="utf-8") as summary:
            summary.writelines(map(_markdown, answers))
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    lines = []
    for answer in answers:
        if not _fails(answer):
            continue
        origins = [each["finding"].get("line", "") for each in answer["points"] if each.get("finding")]
        origin = next(filter(None, origins), "") or f"{answer['program'].partition('::')[0]}:1"
        file, _, line = origin.rpartition(":")
        text = f"{answer['summary']['verdict']} {answer['summary'].get('baseline', '')}".strip()
        for letter, escaped in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
            text = text.replace(letter, escaped)
        lines.append(f"::error file={file},line={line},title=dpsim::{text}")
    return lines


def _markdown(answer: dict[str, Any]) -> str:
    """Return a heading, the table of the runs and the verdict."""
    summary = answer["summary"]
    rows = ["| run | steps | samples a step | largest difference / rounding | first that rounding does not explain |"]
    rows += ["|---|---:|---:|---:|---|"]
    for point in answer["points"]:
        largest, finding = point.get("largest_difference_over_rounding"), point.get("finding")
        first = f"step {finding['step']}, {finding['tensor']}" if finding else "none"
        number = "" if largest is None else f"{largest:.2g}"
        if "run" in point:  # what resumes has no runs that are compared
            rows.append(f"| {point['run']} | {point['steps']} | {point['global_batch']} | {number} | {first} |")
    mark = ":x:" if _fails(answer) else ":white_check_mark:"
    sentences = [f"By design: {design}." for design in summary.get("by_design", ())]
    sentences += [summary["verdict"], summary.get("baseline", "")]
    lines = "\n".join(rows) if len(rows) > 2 else ""
    heading = f"### {mark} dpsim: `{answer['program']}` against {summary.get('first', '')}"
    return f"{heading}\n\n{lines}\n\n{' '.join(sentences)}\n\n"


def main(arguments: Sequence[str]) -> int:
    """``python -m dpsim.testing SCRIPT FLAGS``: ``dpsim reproduce`` of a script, told to GitHub Actions too."""
    program, *flags = arguments or ["--help"]
    if program.startswith("-"):
        print(
            "usage: python -m dpsim.testing SCRIPT [flags of dpsim reproduce --torch-script] [-- arguments of SCRIPT]"
        )
        return 2
    command = [*_dpsim(), "reproduce", "--torch-script", program, "--python", sys.executable, "--json", *flags]
    try:
        answer = {"program": program, **_answer(command, 1, None)}
    except TrainingDiffers as error:
        print(str(error).strip(), file=sys.stderr)
        return 2
    print(answer["summary"]["text"], end="")
    print("\n".join(_github_lines([answer])))
    return int(_fails(answer))
