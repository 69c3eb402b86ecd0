"""``dpsim bench allreduce``: every allreduce of this machine against the memory's limit, and against its peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dpsim.backend import Backend
from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.records.bench import BenchRecord
    from dpsim.records.bench_result import BenchResult

EXAMPLES = """\
Examples:
  dpsim bench allreduce
  dpsim bench allreduce --devices 2 --min 4B --max 64MiB --factor 4
    --algorithm all --dtype float32 --output reports/allreduce
  dpsim bench allreduce --peer-env openmpi=/opt/env-openmpi --peers mpi,openmpi
  dpsim bench allreduce --max 64KiB --peers none --plot small.png
  dpsim bench allreduce --backend cuda --devices 4 --max 256MiB --dtype bfloat16"""

_ALL = "all"


def allreduce(
    *,
    devices: Annotated[
        int | None, Parameter(help="Number of devices: ranks of this machine (2); on a GPU, logical devices.")
    ] = None,
    min: Annotated[str | None, Parameter(name="--min", help="The smallest size: 4B (one element).")] = None,
    max: Annotated[str | None, Parameter(name="--max", help="The largest size: 64MiB (the default), 1GiB.")] = None,
    factor: Annotated[int | None, Parameter(help="From one size to the next (4).")] = None,
    algorithm: Annotated[
        str | None, Parameter(name="--algorithm", help="all (the default), or a list of dpsim's algorithms.")
    ] = None,
    dtype: Annotated[str | None, Parameter(help="float32 (the default), float64; on GPUs float16, bfloat16.")] = None,
    backend: Annotated[Backend | None, Parameter(help="cpu (the default) or cuda.")] = None,
    peers: Annotated[
        str | None,
        Parameter(help="auto (what is found), none, or a list of mpi, gloo, nccl and names given with --peer-env."),
    ] = None,
    peer_env: Annotated[
        str | None,
        Parameter(help="NAME=FOLDER,...: environments with another MPI library, or with PyTorch for gloo."),
    ] = None,
    budget: Annotated[str | None, Parameter(help="Time to measure for, like 60s; three rounds at least.")] = None,
    output: Annotated[Path | None, Parameter(help="Folder for the record, all samples in it, and a report.")] = None,
    json: flags.Json = False,
    plot: Annotated[Path | None, Parameter(help="Draw the bandwidths into this file, .png or .svg.")] = None,
    seed: Annotated[int | None, Parameter(help="Seed of the numbers and of the order.")] = None,
) -> int:
    """Time every allreduce, checked first, as a fraction of what memory allows.

    MPI's allreduce, gloo and NCCL take part where they are found, each in
    processes of its own and at its best; all take turns. Exits with 1 where a
    sum was wrong.
    """
    from dpsim import codec
    from dpsim.folder_lock import locked
    from dpsim.harness.bench.measure import measure
    from dpsim.records.bench import RECORD, AllreduceBench
    from dpsim.report.bench.write import check_plot, write_plot

    flags.writable(output, folder=True)
    flags.writable(plot, flag="--plot")
    check_plot(plot)
    chosen: dict[str, Any] = flags.given(
        devices=devices,
        min_bytes=_size("--min", min),
        max_bytes=_size("--max", max),
        factor=factor,
        algorithms=None if algorithm in (None, _ALL) else flags.listed("--algorithm", algorithm, str),
        dtype=dtype,
        backend=backend,
        peers=_peers(peers),
        peer_envs=_environments(peer_env),
        budget_s=flags.budget(budget),
        seed=seed,
    )
    with locked(output):
        with show.progress() as tell:
            record = measure(AllreduceBench(**chosen), tell)
        if output is not None:
            codec.write_text(output / RECORD, codec.to_json(record, indent=None) + "\n")
        found = show_record(record, output, json=json, command="bench allreduce")
    if plot is not None:
        write_plot(plot, found)
    return 1 if found.wrong else 0


def show_record(record: BenchRecord, folder: Path | None, *, json: bool, command: str) -> BenchResult:
    """Print what a record came to, and write its report where a folder is given."""
    from dpsim.harness.bench.result import result
    from dpsim.records.bench_result import points_json, summary_json
    from dpsim.report.bench.terminal import lines
    from dpsim.report.bench.write import write_bench_report

    found = result(record)
    if folder is not None:
        write_bench_report(folder, record, found)
    if json:
        show.as_json(command, points_json(found), summary_json(found))
    else:
        print("\n".join(lines(record, found)))
        if folder is not None:
            print(f"report: {folder / 'index.html'}")
    return found


def _size(flag: str, text: str | None) -> int | None:
    """Whole bytes, 1 or more. Raises ``ConfigError``."""
    import math

    from dpsim.errors import ConfigError
    from dpsim.units import parse_size

    if text is None:
        return None
    size = parse_size(text)
    if not 1 <= size < math.inf:
        raise ConfigError(f"{flag} is {text!r}", allowed="1 byte or more", remedy="write it like 4B, 64KiB or 64MiB")
    return int(size)


def _peers(text: str | None) -> tuple[str, ...] | None:
    if text == "none":
        return ()
    return None if text in (None, "auto") else flags.listed("--peers", text, str)


def _environments(text: str | None) -> dict[str, str] | None:
    """``openmpi=/a,torch=/b`` as folders by name. Raises ``ConfigError``."""
    from dpsim.errors import ConfigError

    pairs = flags.listed("--peer-env", text, lambda part: part.partition("="))
    if pairs is None:
        return None
    for name, _, folder in pairs:
        if not name or not folder:
            raise ConfigError(f"--peer-env is {text!r}", allowed="NAME=FOLDER,...", remedy="openmpi=/opt/env-openmpi")
    return {name: folder for name, _, folder in pairs}
