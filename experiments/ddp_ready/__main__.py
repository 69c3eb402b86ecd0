"""When gradients are final on two ranks of DDP over gloo, against what a profile of one process predicts.

``python -m dpsim.experiments.ddp_ready --rounds 3`` profiles each model and runs it on two ranks, by turns, every
process with one thread, and prints |predicted / measured - 1| over the gradients. It needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from dpsim.launch import child_process
from dpsim.lowering.computation import ready_times
from dpsim.torch_ddp.profile_script import profile_script
from dpsim.torch_ddp.request import ScriptRequest

SCRIPT = Path(__file__).with_name("train.py")
MODELS = ("mlp", "cnn", "transformer")
RANKS = 2


def predicted(model: str) -> dict[str, float]:
    """Seconds from the start of backward until each gradient is final, by a profile of one process."""
    workload = profile_script(ScriptRequest(script=str(SCRIPT), arguments=("--model", model), devices=RANKS, steps=30))
    names = [workload.tensors[index].name for index in workload.ready_order.tensor]
    return dict(zip(names, ready_times(workload, workload.local_batches[0]).tolist(), strict=True))


def measured(model: str) -> dict[str, float]:
    """The same on rank 0 of two: medians over the steps."""
    with tempfile.TemporaryDirectory(prefix="dpsim-ddp-ready-") as folder:
        path = Path(folder) / "measured.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        done = child_process.run([*torchrun, str(SCRIPT), "--model", model, "--measured", str(path)], timeout_s=300)
        if done.returncode:
            raise SystemExit(done.stderr)
        steps = json.loads(path.read_text())
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{'model':12} {'gradients':>9} {'median |error|':>14} {'last gradient: predicted, measured':>36}")
    for model in MODELS:
        pairs = [(predicted(model), measured(model)) for _ in range(rounds)]
        both = [
            {name: statistics.median(each[side][name] for each in pairs) for name in pairs[0][side]} for side in (0, 1)
        ]
        errors = [abs(both[0][name] / both[1][name] - 1) for name in both[1]]
        last = [max(seconds.values()) for seconds in both]
        print(
            f"{model:12} {len(errors):9} {statistics.median(errors):14.1%} "
            f"{last[0] * 1e3:24.2f} ms {last[1] * 1e3:5.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
