"""When gradients are final on two ranks of DDP over gloo, against what profiles predict.

``python -m dpsim.experiments.ddp_ready --rounds 3`` profiles each model in one process, profiles it in two processes at
once, and runs it on two ranks, by turns, every process with one thread. It prints the median |predicted / measured - 1|
over the gradients: of the profile of one process, of two at once (which has what the ranks' computation takes from each
other), and of the first with all times scaled to the same last gradient (which has the order and the shares alone). It
needs PyTorch.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dpsim.errors import DpsimError
from dpsim.experiments import command
from dpsim.experiments.turns import in_turns
from dpsim.harness.measurement.loop import StopRule
from dpsim.launch import child_process
from dpsim.lowering.computation import ready_times
from dpsim.torch_ddp.profile_script import profile_script
from dpsim.torch_ddp.request import ScriptRequest

SCRIPT = Path(__file__).with_name("train.py")
MODELS = ("mlp", "cnn", "transformer")
RANKS = 2

Ready = Mapping[str, float]
"""Seconds from the start of backward until each gradient is final, by the names of parameters."""


def predicted(model: str, processes: int) -> Ready:
    """Return the times by a profile in each of so many processes at once: the first one's."""
    request = ScriptRequest(script=str(SCRIPT), arguments=("--model", model), devices=RANKS, steps=30)
    with ThreadPoolExecutor(processes) as pool:
        workload, *_ = pool.map(profile_script, [request] * processes)
    names = [workload.tensors[index].name for index in workload.ready_order.tensor]
    return dict(zip(names, ready_times(workload, workload.local_batches[0]).tolist(), strict=True))


def measured(model: str) -> Ready:
    """Return the times on rank 0 of two: medians over the steps."""
    with tempfile.TemporaryDirectory(prefix="dpsim-ddp-ready-") as folder:
        path = Path(folder) / "measured.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        done = child_process.run([*torchrun, str(SCRIPT), "--model", model, "--measured", str(path)], timeout_s=300)
        if done.returncode:
            raise DpsimError(f"torchrun fails: {done.stderr}")
        steps = json.loads(path.read_text())
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def median_error(predicted_s: Ready, measured_s: Ready, scale: float = 1.0) -> float:
    """Return the median over gradients of |scale predicted / measured - 1|."""
    return statistics.median(abs(scale * predicted_s[name] / measured_s[name] - 1) for name in measured_s)


def main() -> int:
    options = command.parser("ddp_ready", __doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    given = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    def run() -> None:
        print(
            f"{'model':12} {'gradients':>9} {'one process':>12} {'two at once':>12} {'shares':>7}   last gradient, ms"
        )
        for model in given.models:
            visits = {n: functools.partial(predicted, model, n) for n in (1, RANKS)}
            visits[0] = functools.partial(measured, model)
            rounds = in_turns(visits, StopRule(least_rounds=given.rounds, most_rounds=given.rounds), warm_up=0)
            alone, together, real = (
                {name: statistics.median(each[name] for each in rounds[n]) for name in rounds[n][0]}
                for n in (1, RANKS, 0)
            )
            last_s = [max(seconds.values()) for seconds in (alone, together, real)]
            shares = median_error(alone, real, last_s[2] / last_s[0])
            print(
                f"{model:12} {len(real):9} {median_error(alone, real):12.1%} {median_error(together, real):12.1%}"
                f" {shares:7.1%}   " + ", ".join(f"{1e3 * each:.2f}" for each in last_s),
                flush=True,
            )

    return command.ended("ddp_ready", run)


if __name__ == "__main__":
    raise SystemExit(main())
