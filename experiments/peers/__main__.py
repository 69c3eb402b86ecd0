"""``python -m dpsim.experiments.peers``: the same training by PyTorch and by dpsim, in turn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dpsim.cli import flags, show
from dpsim.cli.app import run, single

_EXAMPLES = """\
Examples:
  python -m dpsim.experiments.peers --model mlp --devices 2
  python -m dpsim.experiments.peers --model resnet20 --devices 2 --output peers.json"""


def peers(
    *,
    model: Annotated[str | None, Parameter(help="mlp (784-2048-2048-2048-10), mlp:WIDTH,WIDTH or resnet20.")] = None,
    devices: Annotated[str | None, Parameter(help="Ranks of dpsim and of DDP: 2 or 2,4. One rank is added.")] = None,
    systems: Annotated[str | None, Parameter(help="Systems to compare: dpsim,ddp-gloo,ddp-mpi,torch.")] = None,
    rounds: Annotated[int | None, Parameter(help="Rounds at most, in each of which every system is timed.")] = None,
    steps: Annotated[int | None, Parameter(help="Steps of a visit that count at most, after two that do not.")] = None,
    local_batch: Annotated[int | None, Parameter(help="Samples on a rank.")] = None,
    seed: Annotated[int | None, Parameter(help="Seed of initialisation and shuffling.")] = None,
    output: Annotated[Path | None, Parameter(help="Also write the JSON object to this file.")] = None,
    json: flags.Json = False,
) -> None:
    """Time the same training in dpsim and in PyTorch, each at its best, in one interleaved run."""
    from dpsim import codec
    from dpsim.experiments.peers import result
    from dpsim.experiments.peers.measure import measure
    from dpsim.experiments.peers.setting import PeerComparison
    from dpsim.study.environment import version

    flags.writable(output, "output")
    chosen = flags.provided(
        model=model,
        rounds=rounds,
        steps=steps,
        local_batch=local_batch,
        seed=seed,
        devices=flags.listed("--devices", devices, flags.whole("--devices")),
        systems=flags.listed("--systems", systems, str),
    )
    comparison = PeerComparison(**chosen)
    with show.progress() as progress:
        results = measure(comparison, progress)
    points = result.points(comparison, results)
    summary = result.summary(points) | {"rounds": len(results[0].step_s), "torch": version("torch")}
    if output is not None:
        codec.write(output, show.json_object("peers", points, summary))
    if json:
        show.print_json("peers", points, summary)
        return
    show.table(result.COLUMNS, points)
    print("\n".join(result.notes(results)))
    print(f"PyTorch {summary['torch']}, medians of {summary['rounds']} interleaved rounds")


def build() -> App:
    """Return the command by itself, as ``dpsim.cli.app.run`` takes it."""
    return single("python -m dpsim.experiments.peers", peers, _EXAMPLES)


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:], build()))
