"""The ``dpsim`` application: its commands, and the running of one of them."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from cyclopts import App, CycloptsError

from dpsim import installation
from dpsim.cli import commands, flags, old_names
from dpsim.cli.mistakes import as_dpsim_error
from dpsim.errors import ConfigError, DpsimError
from dpsim.launch import jobs, rank_info, rank_process

_EXAMPLES = """\
Examples:
  dpsim doctor
  dpsim sweep fusion-threshold
  dpsim train --model cnn --devices 2 --global-batch 64 --epochs 5
  dpsim predict --workload w.json --machine m.json --devices 8 --global-batch 64

dpsim COMMAND --help explains a command, and --help-all has all of its flags.

Documentation: docs/README.md of dpsim's checkout; make docs builds it there as a site, to read without a network."""

_EVERY_FLAG = "--help-all"


def build(*, every_flag: bool = True) -> App:
    """The application, whose help shows every flag, or those that a command names in ``SHOWN``.

    Its commands import what they need when they run, so that building it is fast.
    """
    app = App(
        name="dpsim",
        help="Data-parallel training, predicted and measured in the same run.",
        version=installation.VERSION,
        help_format="plaintext",
        help_epilogue=_EXAMPLES + flags.WORDS,
        suppress_keyboard_interrupt=False,
    )
    for name, module in commands.modules().items():
        if hasattr(module, "group"):
            app.command(module.group())
        else:
            shown = None if every_flag else getattr(module, "SHOWN", None)
            flags.command(app, getattr(module, name), module.EXAMPLES, shown=shown)
    app.register_install_completion_command(help="Install completion for your shell.", help_epilogue="")
    return app


def single(name: str, function: Callable[..., None], examples: str) -> App:
    """Return the application of a module that ``python -m`` runs: one command, with its name as it is typed."""
    app = App(
        name=name,
        help_format="plaintext",
        help_epilogue=examples,
        version_flags=[],
        suppress_keyboard_interrupt=False,
    )
    flags.command(app, function)
    return app


def run(arguments: Sequence[str], app: App | None = None) -> int:
    """Run one command of ``app`` (``dpsim`` by default); returns the exit code. Errors become text on stderr.

    On ranks other than 0 of an MPI job, it runs the tasks that rank 0 sends instead, and ends the process.
    """
    job = rank_info.job()
    if job is not None and job.rank != 0:
        try:
            rank_process.serve()
        except KeyboardInterrupt:
            return 130  # rank 0 prints the message
    _unwind_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack some characters of a report
        sys.stdout.reconfigure(errors="replace")
    options = itertools.takewhile(lambda word: word != flags.DELIMITER, arguments)
    every_flag = _EVERY_FLAG in options
    app = app or build(every_flag=every_flag)
    try:
        _check_utf8(arguments)
        arguments = old_names.current(arguments, app)
        words = flags.with_delimiter(flags.with_wait(arguments))
        words = ["--help" if every_flag and word == _EVERY_FLAG else word for word in words]
        code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except CycloptsError as error:
        return _print_error(as_dpsim_error(app, error, arguments))
    except jobs.JobFailed as error:
        print(error.traceback, end="", file=sys.stderr)
        _print_error(error)
        return error.exit_code
    except DpsimError as error:
        return _print_error(error)
    except KeyboardInterrupt:
        print("dpsim: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 128 + signal.SIGPIPE
    except (OSError, MemoryError) as error:
        return _print_error(_system_error(error))
    finally:
        if job is not None:
            rank_process.release()


def _check_utf8(arguments: Sequence[str]) -> None:
    """Check that records can hold every argument, before hours of training find that out. Raises ``ConfigError``."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"the argument {argument!r} is not UTF-8",
                allowed="text in UTF-8, which records contain",
                remedy="rename the file, or if its name has accents, set LC_ALL=C.UTF-8",
            ) from None


def _print_error(error: DpsimError) -> int:
    print(f"dpsim: {error}", file=sys.stderr)
    return 2


def _system_error(error: OSError | MemoryError) -> DpsimError:
    """A refusal of the operating system (a path, a full disk, too little memory) as a ``DpsimError``."""
    if isinstance(error, MemoryError):
        given = f"there is not enough memory: {error or 'an allocation failed'}"
        return ConfigError(given, remedy="use a smaller model, data set or batch")
    subject = "stdout" if error.filename is None else str(error.filename)
    if error.filename is None:
        _discard_stdout()
    return ConfigError(f"{subject}: {error.strerror or error}", remedy="choose another path, or free space there")


def _discard_stdout() -> None:
    """Discard whatever is still to be printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwind_on_signals() -> None:
    """Make SIGTERM, and SIGHUP of a terminal that is closed, unwind like an error; ``nohup`` keeps its effect."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)


def _terminate(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # the ranks are ended and temporary files removed as this unwinds
