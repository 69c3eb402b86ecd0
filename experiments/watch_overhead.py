"""How much longer a training's step takes while ``dpsim explain`` observes it: observed and unobserved steps in turns.

``python -m dpsim.experiments.watch_overhead --pairs 8000`` trains a perceptron with DDP on two ranks of this machine.
Of each two steps one is observed, the first or the second at random, so that what changes the machine's speed changes
both. What is done once, the making of the hooks and the record, is timed by itself. Short steps tell best what
observing one takes, which hangs little on their length.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dpsim.experiments import command
from dpsim.launch.scratch import scratch
from dpsim.study.statistics import median_interval

_OBSERVED_STEPS = 30
"""Those of a job that ``dpsim explain`` observes."""
_JOB = """
import glob, json, random, sys, time, torch
import torch.distributed as dist
from time import perf_counter as now
from torch.nn.parallel import DistributedDataParallel as DDP
from dpsim.torch_ddp.injected import watched
folder, pairs, width, observed = sys.argv[1], *map(int, sys.argv[2:])
watched.LONGEST_S = float("inf")
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(12)]))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
x, order = torch.randn(64, width), random.Random(0)

def step():
    began_s = now()
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    return now() - began_s

once_s, end = [], watched.Watcher._end
def timed_end(self, reason):
    began_s = now()
    end(self, reason)
    once_s.append(now() - began_s)
watched.Watcher._end = timed_end

for _ in range(10):
    step()
began_s = now()
watcher = watched.Watcher(ddp, observed, folder)
once_s.append(now() - began_s)
while watcher.watches:
    step()
watcher = watched.Watcher(ddp, 2 * pairs, folder)
for _ in range(20):
    step()
seconds = []
for _ in range(pairs):
    pair = [0.0, 0.0]
    for kind in order.sample((0, 1), 2):
        watcher.watches = bool(kind)
        pair[kind] = step()
    seconds.append(pair)
if dist.get_rank() == 0:
    own_s = json.load(open(glob.glob(f"{folder}/rank-0-*.json")[0]))["own_s"]
    json.dump({"pairs": seconds, "once_s": sum(once_s), "own_s": own_s}, open(f"{folder}/pairs.json", "w"))
watcher.watches = True
watcher.give_up("")
dist.destroy_process_group()
"""


def main() -> int:
    """Measure, and print by how much the steps differ, and what the watcher counts itself."""
    parser = command.parser("watch_overhead", __doc__)
    parser.add_argument("--pairs", type=int, default=8000, help="observed steps, and as many unobserved ones (8000)")
    parser.add_argument("--width", type=int, default=128, help="width of the perceptron (128)")
    arguments = parser.parse_args()
    return command.ended("watch_overhead", lambda: print("\n".join(_lines(_measure(arguments.pairs, arguments.width)))))


def _measure(pairs: int, width: int) -> dict[str, Any]:
    """Train; return the seconds of each pair of steps (unobserved, observed), and what rank 0's watcher took."""
    with scratch("overhead") as folder:
        job = folder / "job.py"
        job.write_text(_JOB, encoding="utf-8")
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(job)]
        subprocess.run([*run, str(folder), *map(str, (pairs, width, _OBSERVED_STEPS))], check=True)
        found: dict[str, Any] = json.loads(Path(folder, "pairs.json").read_text(encoding="utf-8"))
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    alone_s = median_interval([alone for alone, _ in found["pairs"]]).median
    longer = median_interval([watched - alone for alone, watched in found["pairs"]])
    steps_s = _OBSERVED_STEPS * alone_s
    shares = [(_OBSERVED_STEPS * each + found["once_s"]) / steps_s for each in (longer.median, longer.low, longer.high)]
    return [
        f"{len(found['pairs'])} pairs of steps of {alone_s * 1e3:.2f} ms",
        f"an observed step takes {longer.median * 1e6:+.0f} us longer ({longer.low * 1e6:+.0f} to"
        f" {longer.high * 1e6:+.0f} us, 95 %)",
        f"hooks and record take {found['once_s'] * 1e3:.2f} ms once",
        f"of {_OBSERVED_STEPS} steps that is {shares[0]:.2%} ({shares[1]:.2%} to {shares[2]:.2%}); the watcher counts"
        f" {found['own_s'] * 1e3:.2f} ms itself, {found['own_s'] / steps_s:.2%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
