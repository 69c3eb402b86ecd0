"""The commands by name, and what becomes of an error."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

import dpsim
from dpsim.cli import bench, calibrate, doctor, machine, predict, profile, report, reproduce, sweep, trace, train
from dpsim.cli import launch as launching
from dpsim.errors import ConfigError, DpsimError, unknown
from dpsim.launch import jobs

_EXAMPLES = """\
Examples:
  dpsim doctor
  dpsim sweep fusion-threshold
  dpsim train --model cnn --devices 2 --global-batch 64 --epochs 5
  dpsim predict --workload w.json --machine m.json --devices 8 --global-batch 64

dpsim COMMAND --help explains a command."""

_SWEEP_EXAMPLES = """\
Examples:
  dpsim sweep fusion-threshold
  dpsim sweep fusion-threshold --devices 1,2 --network node,paced:50us,1gbit
  dpsim sweep fusion-threshold --fusion-threshold 0,32KiB,inf --output mine
  dpsim sweep devices --model cnn --devices 1,2 --batch-norm local"""

_BENCH_EXAMPLES = """\
Examples:
  dpsim bench allreduce
  dpsim bench allreduce --devices 2 --min 4B --max 64MiB --factor 4"""

_MACHINE_EXAMPLES = """\
Examples:
  dpsim machine show machine.json
  dpsim machine compare old.json new.json --plot both.svg
  dpsim machine merge two.json four.json --output cluster.json"""

_LAUNCH_EXAMPLES = """\
Examples:
  dpsim launch local --devices 2 -- train.py --lr 0.1
  dpsim launch slurm --devices 2x4 -- train --model cnn --global-batch 512
  dpsim launch pbs --devices 2x4 --dry-run -- train.py"""


def build() -> App:
    """The application. Commands are small: each imports what it needs when it runs."""
    app = App(
        name="dpsim",
        help="Data-parallel training, predicted and measured in the same run.",
        version=dpsim.__version__,
        help_format="plaintext",
        help_epilogue=_EXAMPLES,
        suppress_keyboard_interrupt=False,
    )
    app.command(doctor.doctor, help_epilogue=doctor.EXAMPLES)
    app.command(train.train, help_epilogue=train.EXAMPLES)
    app.command(reproduce.reproduce, help_epilogue=reproduce.EXAMPLES)
    app.command(profile.profile, help_epilogue=profile.EXAMPLES)
    app.command(calibrate.calibrate, help_epilogue=calibrate.EXAMPLES)
    app.command(predict.predict, help_epilogue=predict.EXAMPLES)
    app.command(report.report, help_epilogue=report.EXAMPLES)
    app.command(trace.trace, help_epilogue=trace.EXAMPLES)
    sweeps = App(
        name="sweep",
        help="Predict, then measure, then compare over a range of settings.",
        help_format="plaintext",
        help_epilogue=_SWEEP_EXAMPLES,
    )
    sweeps.command(sweep.fusion_threshold, help_epilogue=sweep.EXAMPLES)
    sweeps.command(sweep.devices, help_epilogue=sweep.DEVICES_EXAMPLES)
    app.command(sweeps)
    benches = App(
        name="bench",
        help="How fast one operation is here, against memory's limit and against its peers.",
        help_format="plaintext",
        help_epilogue=_BENCH_EXAMPLES,
    )
    benches.command(bench.allreduce, help_epilogue=bench.EXAMPLES)
    app.command(benches)
    machines = App(
        name="machine",
        help="Machine files shown, compared and merged.",
        help_format="plaintext",
        help_epilogue=_MACHINE_EXAMPLES,
    )
    machines.command(machine.show_machine, name="show", help_epilogue=machine.SHOW_EXAMPLES)
    machines.command(machine.compare, help_epilogue=machine.COMPARE_EXAMPLES)
    machines.command(machine.merge, help_epilogue=machine.MERGE_EXAMPLES)
    app.command(machines)
    launches = App(
        name="launch",
        help="Run a script or a command on ranks, here or by a scheduler.",
        help_format="plaintext",
        help_epilogue=_LAUNCH_EXAMPLES,
    )
    launches.command(launching.local, help_epilogue=launching.LOCAL_EXAMPLES)
    launches.command(launching.slurm, help_epilogue=launching.SLURM_EXAMPLES)
    launches.command(launching.pbs, help_epilogue=launching.PBS_EXAMPLES)
    app.command(launches)
    app.register_install_completion_command(help="Install completion for your shell.", help_epilogue="")
    return app


def run(arguments: Sequence[str], app: App | None = None) -> int:
    """Run one command, of dpsim or of another application; returns the exit code. Errors become text on stderr."""
    here = jobs.job()
    if here is not None and here.rank != 0:
        try:
            jobs.serve()
        except KeyboardInterrupt:
            return 130  # rank 0 says so
    _end_in_order()
    _prepare_stdout()
    app = app or build()
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except CycloptsError as error:
        return _complain(_misspelt(app, error, arguments) or _usage(app, error))
    except jobs.JobFailed as error:
        print(error.traceback, end="", file=sys.stderr)
        _complain(error)
        return error.exit_code
    except DpsimError as error:
        return _complain(error)
    except KeyboardInterrupt:
        print("dpsim: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _close_stdout()
        return 128 + signal.SIGPIPE
    except (OSError, MemoryError) as error:
        return _complain(_of_the_system(error))
    finally:
        if here is not None:
            jobs.release()


def _complain(error: DpsimError) -> int:
    print(f"dpsim: {error}", file=sys.stderr)
    return 2


def _of_the_system(error: OSError | MemoryError) -> DpsimError:
    """What the system refused, as one of ours: a path that cannot be, a full disk, memory that is not there."""
    if isinstance(error, MemoryError):
        given = f"there is not enough memory: {error or 'an allocation failed'}"
        return ConfigError(given, remedy="give a smaller model, data set or batch")
    what = "stdout" if error.filename is None else str(error.filename)
    if error.filename is None:
        _close_stdout()
    return ConfigError(f"{what}: {error.strerror or error}", remedy="choose another path, or make room there")


def _prepare_stdout() -> None:
    """Print whatever stdout is: closed, or of an encoding without the letters of a report."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _close_stdout() -> None:
    """Let what is still to be printed go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_in_order() -> None:
    """Let SIGTERM, and SIGHUP of a terminal that goes away, unwind as an error does; ``nohup`` keeps its meaning."""
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminated)


def _terminated(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # unwinds, so that the ranks end and temporary files go


def _misspelt(app: App, error: CycloptsError, arguments: Sequence[str]) -> ConfigError | None:
    """The first flag that the command does not have, where another one is missing: it may be that one, misspelt."""
    if not isinstance(error, MissingArgumentError) or error.keyword:
        return None
    command, words = app, list(error.command_chain or ())
    for word in words:
        command = command[word]
    flags = sorted(name for one in command.assemble_argument_collection() for name in one.names)
    before_other_words = itertools.takewhile(lambda word: word != "--", arguments)
    for given in (word.split("=", 1)[0] for word in before_other_words if word.startswith("--")):
        if given not in flags:
            remedy = f"see {' '.join([*app.name, *words])} --help"
            return unknown("flag", given, [name for name in flags if name.startswith("--")], remedy=remedy)
    return None


def _usage(app: App, error: CycloptsError) -> ConfigError:
    """A parsing error as one of ours: what was given, what is allowed, what to do."""
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__
    words = list(error.command_chain or ())
    remedy = f"see {' '.join([*app.name, *words])} --help"
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        parent = error.app if error.app is not None else app
        return unknown("command", error.unused_tokens[0], _names(parent), remedy=remedy)
    if isinstance(error, UnknownOptionError):
        flags = sorted(name for a in error.argument_collection for name in a.names if name.startswith("--"))
        given = error.token.keyword or error.token.value
        return unknown("flag", given.split("=", 1)[0], [*flags, "--help"], remedy=remedy)
    if isinstance(error, CoercionError) and error.token is not None and error.argument is not None:
        given = error.token.keyword or error.argument.name
        return ConfigError(f"{given} is {error.token.value!r}", allowed=_kind(error.target_type), remedy=remedy)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        given = error.keyword or error.argument.name
        what = "has no value" if error.keyword else "is missing"
        return ConfigError(f"{given} {what}", allowed=error.argument.parameter.help or "", remedy=remedy)
    if isinstance(error, UnusedCliTokensError):
        return ConfigError(
            f"{' '.join(error.unused_tokens or ())!r} is more than this command takes", allowed="flags", remedy=remedy
        )
    error.verbose = False
    return ConfigError(" ".join(str(error).split()), remedy=remedy)


def _kind(target: object) -> str:
    if get_origin(target) is Literal:
        return ", ".join(str(word) for word in get_args(target))
    return {int: "a whole number", float: "a number", bool: "no value: it is a switch"}.get(target, "")  # type: ignore[call-overload, no-any-return]


def _names(app: App) -> list[str]:
    return [name for name in app if not name.startswith("-")]
