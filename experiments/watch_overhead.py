"""How much longer a training takes that ``dpsim watch`` observes: with it and without, in turns.

``python -m dpsim.experiments.watch_overhead --turns 4 --steps 200`` trains a perceptron with DDP on two ranks, on this
machine, and compares medians of whole trainings, and of the steps that are watched.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

from dpsim.experiments import command
from dpsim.launch.scratch import scratch

_WATCHED = slice(4, 34)
"""The steps that are watched: 30 after the warm-up."""
_JOB = """
import json, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
path, steps, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(12)]))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
x, moments = torch.randn(64, width), [time.perf_counter()]
for _ in range(steps):
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()
    moments.append(time.perf_counter())
if dist.get_rank() == 0:
    json.dump(moments, open(path, "w"))
"""


def main() -> int:
    """Measure, and print the two ratios."""
    parser = command.parser("watch_overhead", __doc__)
    parser.add_argument("--turns", type=int, default=4, help="trainings of each kind (4)")
    parser.add_argument("--steps", type=int, default=200, help="steps of a training (200)")
    parser.add_argument("--width", type=int, default=512, help="width of the perceptron (512)")
    arguments = parser.parse_args()
    return command.ended("watch_overhead", lambda: _measure(arguments.turns, arguments.steps, arguments.width))


def _measure(turns: int, steps: int, width: int) -> None:
    trainings: dict[str, list[list[float]]] = {"alone": [], "watched": []}
    with scratch("overhead") as folder:
        job = folder / "job.py"
        job.write_text(_JOB, encoding="utf-8")
        for turn in range(turns):
            for kind in ("alone", "watched") if turn % 2 else ("watched", "alone"):
                command.tell(f"turn {turn + 1} of {turns}: {kind}")
                trainings[kind].append(_trained(job, folder / "moments.json", steps, width, watched=kind == "watched"))
    for name, part in (("all steps", slice(None)), ("the watched steps", _WATCHED)):
        seconds = {kind: [sum(each[part]) for each in of] for kind, of in trainings.items()}
        alone_s, watched_s = (statistics.median(seconds[kind]) for kind in ("alone", "watched"))
        spread = (max(seconds["alone"]) - min(seconds["alone"])) / alone_s
        print(
            f"{name}: {alone_s:.3f} s alone, {watched_s:.3f} s watched, {watched_s / alone_s - 1:+.2%}"
            f" (trainings alone differ by {spread:.1%})"
        )
    medians = [statistics.median(list(itertools.chain(*trainings[kind]))) for kind in ("alone", "watched")]
    print(f"the median step: {medians[0] * 1e3:.2f} ms alone, {medians[1] * 1e3:.2f} ms watched")


def _trained(job: Path, moments: Path, steps: int, width: int, *, watched: bool) -> list[float]:
    """Train once; the seconds of each step."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(job)]
    watch = [sys.executable, "-m", "dpsim", "watch", "--"] if watched else []
    subprocess.run([*watch, *run, str(moments), str(steps), str(width)], check=True, capture_output=True)
    at_s = json.loads(moments.read_text(encoding="utf-8"))
    return [end - begin for begin, end in itertools.pairwise(at_s)]


if __name__ == "__main__":
    sys.exit(main())
