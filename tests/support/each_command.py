"""Every command of dpsim with what it needs beside a flag, for tests of each flag. The ranks do not start."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App
from published_files import EXPERIMENTS

from dpsim.cli import flags, script_sweep, sweep

STARTED = "the ranks would start here"
MACHINES = EXPERIMENTS / "machines"
EXAMPLE = Path(__file__).parents[2] / "reports" / "example"
LOG = MACHINES / "benchmarks" / "imb.txt"
FILES = f"--workload {MACHINES}/googlenet_k80.toml --machine {MACHINES}/k80_10gbe.toml"
EACH = {
    "train": "",
    "reproduce": "",
    "profile": "",
    "calibrate": "",
    "predict": f"{FILES} --devices 4",
    "tune": f"{FILES} --devices 4",
    "explain": "--measured 1:0.4s,16:0.6s --parameters 100000000",
    "report": f"{EXAMPLE} --output again",
    "bench allreduce": "--peers none --max 4KiB",
    "launch": "slurm --devices 2 --dry-run train",
    "sweep": f"{EXPERIMENTS}/sweeps/algorithms.toml",
    "sweep fusion-threshold": "",
    "sweep devices": "",
    "sweep local-batch": "",
    "sweep batch-norm": "",
}
"""What a command needs besides the flag."""
STEPS = (
    f"--workload {MACHINES}/googlenet_k80.toml --from-steps devices=1,local_batch=64,step_s=392ms"
    " --from-steps devices=2,local_batch=64,step_s=450ms,overlap=off"
)
_GLOBAL, _LOCAL = "64,128,256", "8,16,32"
OF_COMMAND = {
    "predict --assume": "contention=2,collective_overhead_s=20us",
    "predict --rank": "strategy",
    "predict --memory": "16GiB --rank strategy",
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
    "calibrate --show": f"{MACHINES}/k80_10gbe.toml",
    "calibrate --compare": f"{MACHINES}/k80_10gbe.toml,{MACHINES}/k80_10gbe.toml",
    "calibrate --merge": f"{MACHINES}/k80_10gbe.toml,{MACHINES}/ethernet_10gbit.toml",
    "calibrate --plot": f"drawn.svg --show {MACHINES}/k80_10gbe.toml",
    "profile --from-steps": STEPS.partition("--from-steps ")[2] + f" --workload {MACHINES}/googlenet_k80.toml",
    "profile --workload": STEPS.partition("--workload ")[2],
    "profile --machine": f"{MACHINES}/k80_10gbe.toml --free compute {STEPS}",
    "profile --leaves": "8,batch_norm=leaf",
    "profile --free": f"compute,bandwidth {STEPS}",
    "predict --find": "bucket",
    "predict --target": "efficiency=90% --find devices",
    "predict --samples": "1.28M",
    "predict --tokens-per-sample": "2048",
    "predict --epochs": "90 --samples 1.28M",
    "predict --price": "2.5 --samples 1.28M",
    "report --format": "csv",
    "report --json": "--format csv",
    "report --label": f"one,two {EXAMPLE}",
    "report --network": "paced:50us,1gbit --trace",
    "report --devices": "2 --trace",
    "report --local-batch": "256 --trace",
    "report --batch-norm": "local --trace",
    "report --fusion-threshold": "64KiB --trace",
    "report --overlap": "off --trace",
    "sweep --algorithm": "ring,halving-doubling",
    "sweep --network": "paced:50us,1gbit --algorithm ring,direct",
    "sweep --wire-dtype": "bfloat16 --algorithm auto,direct",
    "sweep devices --local-batch": "16",
    "sweep local-batch --local-batch": _LOCAL,
    "sweep local-batch --global-batch": _GLOBAL,
    "sweep batch-norm --batch-norm": "local,global",
}
"""What follows a flag of one command, or a field of its --set."""


def commands(application: App, words: tuple[str, ...] = ()) -> Iterator[tuple[str, App]]:
    """Yield each command by its words, and ``sweep`` once more with each of its questions."""
    for word in application:
        if not word.startswith("-"):
            yield from commands(application[word], (*words, word))
    if words and application.default_command is not None:
        yield " ".join(words), application
    if words == ("sweep",):
        yield from ((f"sweep {question}", application) for question in sweep.QUESTIONS)


def is_refused(command: str, flag: str) -> bool:
    """Return whether a flag is one of a script, or of another question of a sweep than the command's."""
    name, _, question = command.partition(" ")
    of = {
        each: [flags.flag_of(word.removesuffix("...")) for word in sweep.QUESTIONS[each].split()]
        for each in sweep.QUESTIONS
    }
    of["script"] = [flags.flag_of(word) for word in (*inspect.get_annotations(script_sweep.ScriptFlags), "runtime")]
    return (
        name == "sweep"
        and flag not in of.get(question, ["--global-batch"])
        and any(flag in each for each in of.values())
    )


def started(*_: object, **__: object) -> None:
    raise RuntimeError("the ranks would start here")  # its code runs among the globals of on_ranks
