"""The commands whose processes get signals, and what each of them promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpsim.runtime.checkpoint import checkpoints

_RANKS = ("launcher", "keeper", "mpiexec", "proxy", "rank")
_SYNTHETIC = "synthetic:4x4x1,classes=3,train=640,test=8"
_TRAINING = """
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(0, 3, (4,))).backward()
    optimizer.step()
"""
_OWN_SCRIPT = "import time\n\nimport dpsim\n\ntime.sleep(1)\nprint(dpsim.rank(), dpsim.size())\n"


@dataclass(frozen=True)
class Command:
    """A command of ``python -m``, the kinds of its processes, and about how long it runs: signals come meanwhile.

    ``trains``: it writes checkpoints, from which ``train --resume`` continues. ``elastic``: it goes on by itself when
    a rank is killed. ``predictions``: the file that the same command, given again, keeps and continues from.
    """

    line: str
    usual_s: float
    kinds: tuple[str, ...] = _RANKS
    trains: bool = False
    elastic: bool = False
    predictions: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.line.split())

    def again(self, folder: Path) -> tuple[str, ...]:
        """Return the words of the command that continues in its folder; none where nothing can be continued."""
        if self.trains and (folder / "run").exists() and checkpoints(folder / "run"):
            return ("dpsim", "train", "--resume", "run")
        return self.words if self.trains or self.predictions else ()


def _training(flags: str = "", kinds: tuple[str, ...] = _RANKS) -> Command:
    line = "dpsim train --model mlp:6 --steps 1000 --devices 2 --leaves 8 --checkpoint run --checkpoint-every 100"
    return Command(f"{line} {flags}", 8, kinds, trains=True, elastic=flags == "--elastic")


COMMANDS = {
    "train": _training(),
    "train --elastic": _training("--elastic", (*_RANKS, "watcher")),
    "train --strategy zero1": _training("--strategy zero1"),
    "launch local": Command("dpsim launch local --devices 4 -- own.py", 4),
    "profile --torch-script": Command(
        "dpsim profile --torch-script train.py --devices 2 --steps 4", 12, ("launcher", "keeper", "script")
    ),
    "calibrate": Command("dpsim calibrate --devices 2 --budget 1s", 14),
    "reproduce": Command("dpsim reproduce --model mlp:6 --devices 1,2 --steps 20 --output record", 10),
    "sweep": Command(
        f"dpsim sweep fusion-threshold --model mlp:6 --dataset {_SYNTHETIC} --fusion-threshold 0,inf --devices 2"
        " --budget 1s --output sweep",
        40,
        predictions="sweep/predictions.json",
    ),
    "measure --torch-script": Command(
        "dpsim measure --torch-script train.py --devices 2 --communication gloo --bucket-cap inf --budget 1s"
        " --output measured",
        110,
        (*_RANKS, "script"),
        predictions="measured/predictions.json",
    ),
    "bench allreduce": Command(
        "dpsim bench allreduce --devices 2 --max 4KiB --budget 1s --peers mpi,gloo", 50, (*_RANKS, "script")
    ),
    "experiments.peers": Command(
        "dpsim.experiments.peers --model mlp:8 --devices 2 --systems dpsim,ddp-gloo --rounds 6 --steps 2"
        " --local-batch 4",
        60,
    ),
}
_SLOW = ("sweep", "measure --torch-script", "bench allreduce", "experiments.peers")
_FAST = tuple(name for name in COMMANDS if name not in _SLOW)
TURNS = (*_FAST, *_FAST, *_FAST, *_SLOW)
"""Commands that take long get fewer signals."""


def prepare(folder: Path) -> None:
    """Write the scripts that the commands name into their folder."""
    (folder / "train.py").write_text(_TRAINING, encoding="utf-8")
    (folder / "own.py").write_text(_OWN_SCRIPT, encoding="utf-8")
