"""``python -m dpsim.experiments.peers`` times the same training in dpsim and in PyTorch, each at its best, in turn.

Examples:
  python -m dpsim.experiments.peers --model mlp --devices 2
  python -m dpsim.experiments.peers --model resnet20 --devices 2 --output peers.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpsim import codec
from dpsim.cli import flags, readers, show
from dpsim.experiments import command
from dpsim.experiments.peers import result
from dpsim.experiments.peers.measure import measure
from dpsim.experiments.peers.setting import PeerComparison
from dpsim.study.environment import version


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 2 where nothing can be compared."""
    options = command.parser("peers", __doc__)
    options.add_argument("--model", help="mlp (784-2048-2048-2048-10), mlp:WIDTH,WIDTH or resnet20")
    options.add_argument("--devices", help="ranks of dpsim and of DDP: 2 or 2,4; one rank is added")
    options.add_argument("--systems", help="systems to compare: dpsim,ddp-gloo,ddp-mpi,torch")
    options.add_argument("--rounds", type=int, help="rounds at most, in each of which every system is timed")
    options.add_argument("--steps", type=int, help="steps of a visit that count at most, after two that do not")
    options.add_argument("--local-batch", type=int, help="samples on a rank")
    options.add_argument("--seed", type=int, help="seed of initialisation and shuffling")
    options.add_argument("--output", type=Path, help="file for the JSON object")
    chosen = {name: value for name, value in vars(options.parse_args(arguments)).items() if value is not None}

    def run() -> None:
        flags.writable(output := chosen.pop("output", None), "output")
        devices = readers.listed("--devices", chosen.pop("devices", None), readers.whole_numbers("--devices"))
        systems = readers.listed("--systems", chosen.pop("systems", None), str)
        comparison = PeerComparison(**readers.provided(devices=devices, systems=systems, **chosen))
        results = measure(comparison, command.tell)
        points = result.points(comparison, results)
        summary = result.summary(points) | {"rounds": len(results[0].step_s), "torch": version("torch")}
        if output is not None:
            codec.write(output, show.json_object("peers", points, summary))
        show.table(result.COLUMNS, points)
        print("\n".join(result.notes(results)))
        print(f"PyTorch {summary['torch']}, medians of {summary['rounds']} interleaved rounds")

    return command.ended("peers", run)


if __name__ == "__main__":
    raise SystemExit(main())
