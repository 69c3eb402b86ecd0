"""Each flag of each command, given alone: the command comes as far as starting its ranks, or to its end without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from cyclopts import App
from published_files import EXPERIMENTS

from dpsim.cli import app
from dpsim.launch import jobs
from dpsim.study import other_processes

Dpsim = Callable[..., tuple[int, str, str]]
STARTED = "the ranks would start here"
MACHINES = EXPERIMENTS / "machines"
EXAMPLE = Path(__file__).parents[2] / "reports" / "example"
LOG = MACHINES / "benchmarks" / "imb.txt"
EXAMPLE_SETS = EXPERIMENTS / "validation_example"
FILES = f"--workload {MACHINES}/googlenet_k80.toml --machine {MACHINES}/k80_10gbe.toml"
EACH = {
    "train": "",
    "reproduce": "",
    "profile": "",
    "calibrate": "",
    "predict": f"{FILES} --devices 2,4",
    "advise": f"{FILES} --devices 4",
    "tune": f"{FILES} --devices 4",
    "explore": f"{FILES} --devices 4",
    "explain": "--measured 1:0.4s,16:0.6s --parameters 100000000",
    "estimate": f"--workload {MACHINES}/googlenet_k80.toml --row devices=1,local_batch=64,step_s=392ms"
    " --row devices=2,local_batch=64,step_s=450ms,overlap=off",
    "report": f"{EXAMPLE} --output again",
    "compare": f"{EXAMPLE} {EXAMPLE}",
    "validate": f"--sets {EXAMPLE_SETS}",
    "trace": f"{EXAMPLE}",
    "bench allreduce": "--peers none --max 4KiB",
    "lab": "gradient-descent",
    "machine list": "",
    "machine show": f"{MACHINES}/k80_10gbe.toml",
    "machine compare": f"{MACHINES}/k80_10gbe.toml {MACHINES}/k80_10gbe.toml",
    "machine merge": f"{MACHINES}/k80_10gbe.toml {LOG.parent}/../ethernet_10gbit.toml --output merged.json",
    "launch slurm": "--devices 2 --dry-run train",
    "launch pbs": "--devices 2 --dry-run train",
    "sweep": f"{EXPERIMENTS}/sweeps/devices.toml",
    "sweep fusion-threshold": "",
    "sweep devices": "",
    "sweep local-batch": "",
    "sweep batch-norm": "",
}
"""What a command needs besides the flag."""
LEFT_OUT = ("doctor", "launch local", "measure", "watch")
"""Commands that run what they check or start, or need PyTorch: they have tests of their own."""
VALUES = {
    "--model": "cnn",
    "--dataset": "digits",
    "--leaves": "8",
    "--global-batch": "64",
    "--collective-overhead": "20us",
    "--contention": "2",
    "--synchronisation-loss": "1.1",
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
_GLOBAL, _LOCAL = "64,128,256", "8,16,32"
OF_COMMAND = {
    "advise --memory": "16GiB",
    "advise --measure": "--model mlp:8",
    "tune --measure": "--model mlp:8",
    "tune --wait-until-quiet": "10m --measure --model mlp:8",
    "tune --local-batch": "64,128",
    "explain --machine": f"{MACHINES}/k80_10gbe.toml",
    "explain --network-log": f"{LOG.parent}/nccl.json",
    "train --trust-coefficient": "1e-3 --optimizer lars",
    "train --checkpoint-every": "5 --checkpoint saved",
    "train --elastic": "--reproducible --checkpoint saved",
    "train --record": "order.json --strategy parameter-server",
    "calibrate --from": LOG,
    "calibrate --format": f"imb --from {LOG}",
    "calibrate --keep-outliers": f"--from {LOG}",
    "calibrate --out-of-place": f"--from {LOG.parent}/nccl.json",
    "calibrate --line-rate": f"25gbit --from {LOG}",
    "predict --find": "bucket",
    "predict --efficiency": "90% --find devices",
    "predict --speedup": "1.5 --find devices",
    "predict --step-time": "1s --find devices",
    "report --format": "csv",
    "report --json": "--format csv",
    "trace --local-batch": "256",
    "trace --overlap": "off",
    "validate --submission": f"{EXAMPLE_SETS}/submission.json",
    "validate --outcomes": f"{EXAMPLE_SETS}/outcomes.json",
    "validate --predictions": "written.json",
    "sweep fusion-threshold --experiment": f"{EXPERIMENTS}/sweeps/fusion_threshold.toml",
    "sweep devices --experiment": f"{EXPERIMENTS}/sweeps/devices.toml",
    "sweep devices --local-batch": "16 --scaling weak",
    "sweep local-batch --experiment": f"{EXPERIMENTS}/sweeps/local_batch.toml",
    "sweep local-batch --local-batch": _LOCAL,
    "sweep local-batch --global-batch": _GLOBAL,
    "sweep local-batch --scaling": f"strong --global-batch {_GLOBAL}",
    "sweep batch-norm --experiment": f"{EXPERIMENTS}/sweeps/batch_norm.toml",
    "sweep batch-norm --batch-norm": "local,global",
    "sweep batch-norm --scaling": f"strong --global-batch {_GLOBAL}",
}
"""What follows a flag of one command."""
OWN_TESTS = {
    *(
        "train --resume",
        "train --replay",
        "train --hostfile",
        "reproduce --against",
        "bench allreduce --peer-env",
        "sweep --experiment",
    ),
    "report --check",
    *(f"reproduce --{flag}" for flag in ("torch-script", "torch-module", "bucket-cap", "script-may-write")),
    *(f"estimate --{flag}" for flag in ("model", "dataset", "torch-script", "machine", "rows", "free", "row")),
    *(f"explain --{flag}" for flag in ("torch-script", "torch-module", "trace", "devices", "steps", "network")),
    *("explain --script-may-write", "explain --workload", "explain --wait-until-quiet"),
    *("predict --target-loss", "predict --convergence", "profile --torch-script", "profile --torch-module"),
    *("tune --torch-script", "tune --torch-module"),
    *("profile --torch", "profile --from", "profile --devices", "profile --steps", "profile --script-may-write"),
}
"""Flags that need files, PyTorch or one another, and have tests of their own."""


def commands(application: App, words: tuple[str, ...] = ()) -> Iterator[tuple[str, App]]:
    for word in application:
        if not word.startswith("-"):
            yield from commands(application[word], (*words, word))
    if words and application.default_command is not None:
        yield " ".join(words), application


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
            if flag.startswith("--") and f"{command} {flag}" not in OWN_TESTS and flag not in EACH[command].split():
                yield pytest.param(command, f"{flag} {value(command, flag, argument.hint)}", id=f"{command} {flag}")


def started(*_: object, **__: object) -> None:
    raise RuntimeError("the ranks would start here")  # its code runs among the globals of on_ranks


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
    }
    assert {*OWN_TESTS, *OF_COMMAND} <= known
