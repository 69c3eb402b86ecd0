"""Each flag of each command, given alone: the command comes as far as starting its ranks, or to its end without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from cyclopts import App
from each_command import EACH, OF_COMMAND, STARTED, STEPS, commands, is_refused, started

from dpsim.cli import app, flags, sweep
from dpsim.launch import jobs
from dpsim.study import other_processes

Dpsim = Callable[..., tuple[int, str, str]]
LEFT_OUT = ("doctor", "launch local")
"""Commands that run what they check or start, or need PyTorch: they have tests of their own."""
VALUES = {
    "--model": "cnn",
    "--dataset": "digits",
    "--leaves": "8",
    "--global-batch": "64",
    "--cycle": "5ms",
    "--fusion-rule": "ddp",
    "--fusion-threshold": "64KiB",
    "--algorithm": "direct",
    "--overlap": "thread",
    "--network": "paced:50us,1gbit",
    "--optimizer": "adamw",
    "--schedule": "cosine",
    "--budget": "1s",
    "--dtype": "float64",
    "--max": "1KiB",
    "--min": "4B",
    "--label": "one,two",
    "--peers": "mpi",
    "--time": "1:00:00",
    "--name": "job",
    "--account": "me",
    "--queue": "short",
    "--label-smoothing": "0.1",
    "--plot": "drawn.svg",
    "--output": "out",
    "--batch-norm": "local",
    "--strategy": "data-parallel",
    "--framework": "horovod",
    "--wire-dtype": "bfloat16",
    "--seeds": "10",
    "--wait-until-quiet": "10m",
}
"""Values of flags whose type does not say one that every command takes."""
OWN_TESTS = {
    *(
        "train --resume",
        "train --replay",
        "train --hostfile",
        "reproduce --against",
        "bench allreduce --network",
    ),
    "launch --image",
    *("report --check", "report --page", "report --ledger", "report --share"),
    *(f"reproduce --{flag}" for flag in ("torch-script", "python", "script-may-write", "resume-on", "explain-bits")),
    *(f"explain --{flag}" for flag in ("torch-script", "trace", "devices", "steps", "network", "json-line")),
    *("explain --samples", "explain --script-may-write", "explain --workload", "explain --wait-until-quiet"),
    *(
        "predict --target-loss",
        "predict --collective",
        "predict --size",
        "predict --plot",
        "profile --torch-script",
    ),
    *(f"sweep{of} --{flag}" for of in ("", *(f" {each}" for each in sweep.QUESTIONS)) for flag in ("array", "dry-run")),
    *("tune --torch-script", "tune --wait-until-quiet"),
    *(
        "profile --torch",
        "profile --from",
        "profile --devices",
        "profile --steps",
        "profile --python",
        "profile --script-may-write",
    ),
}
"""Flags that need files, PyTorch or one another, and have tests of their own."""


OF_STEPS = ("accumulate", "fusion_rule", "fusion_threshold_bytes", "cycle_s", "algorithm", "overlap", "batch_norm")
OF_STEPS += ("wire_dtype", "strategy", "leaves")
"""Fields that ``profile --set`` takes with measured steps."""


def value(command: str, flag: str, hint: Any) -> str:
    """Return what follows a flag: nothing for one without a value, else what the tables say, or a value of its type."""
    kinds = [kind for kind in get_args(hint) or [hint] if kind is not type(None)]
    if (given := OF_COMMAND.get(f"{command} {flag}")) is not None:
        return str(given)
    if bool in kinds:
        return ""
    if get_origin(kinds[0]) is Literal or isinstance(kinds[0], str):
        return VALUES.get(flag) or str((get_args(kinds[0]) or kinds)[0])
    return VALUES.get(flag, "0.5" if kinds[0] is float else "2")


def cases() -> Iterator[Any]:
    for command, application in commands(app.build()):
        for argument in application.assemble_argument_collection() if command not in LEFT_OUT else ():
            flag = argument.names[0]
            if flag == flags.SET:
                yield from cases_of_fields(command, application)
            if not flag.startswith("--") or is_refused(command, flag) or flag == flags.SET:
                continue
            if f"{command} {flag}" not in OWN_TESTS and flag not in EACH[command].split():
                yield pytest.param(command, f"{flag} {value(command, flag, argument.hint)}", id=f"{command} {flag}")


def cases_of_fields(command: str, application: App) -> Iterator[Any]:
    """Yield each field that a command takes by ``--set`` alone."""
    for name in flags.by_set(application.default_command):
        flag = flags.flag_of(name)
        if not is_refused(command, flag):
            text = value(command, flag, flags.known_fields()[name].kind) or "yes"
            steps = f" {STEPS}" if command == "profile" and name in OF_STEPS else ""
            yield pytest.param(command, f"--set {name}={text}{steps}", id=f"{command} --set {name}")


@pytest.mark.parametrize(("command", "given"), list(cases()))
def test_a_flag_does_not_break_its_command(
    command: str, given: str, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(other_processes, "wait_until_quiet", lambda *_: None)
    monkeypatch.setattr(other_processes, "look", lambda: None)
    monkeypatch.setattr(jobs.on_ranks, "__code__", started.__code__)
    arguments = f"{given} {EACH[command]}" if command.startswith("launch") else f"{EACH[command]} {given}"
    try:
        code, _, err = dpsim(*command.split(), *arguments.split())
    except RuntimeError as error:
        assert str(error) == STARTED
    else:
        assert code == 0 or STARTED in err, err


def test_every_flag_that_is_left_out_exists() -> None:
    known = {
        f"{command} {name}"
        for command, application in commands(app.build())
        for argument in application.assemble_argument_collection()
        for name in argument.names
    } | {
        f"{command} {flags.flag_of(name)}"
        for command, application in commands(app.build())
        for name in flags.by_set(application.default_command)
    }
    assert {*OWN_TESTS, *OF_COMMAND} <= known
