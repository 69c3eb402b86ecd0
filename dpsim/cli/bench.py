"""``dpsim bench allreduce``: every allreduce of this machine, compared with memory's limit and with peers."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from dpsim.algorithms import Backend
from dpsim.cli import flags, outputs, readers, show

EXAMPLES = """\
Examples:
  dpsim bench allreduce
  dpsim bench allreduce --devices 2 --min 4B --max 64MiB --factor 4"""
_ALLREDUCE_EXAMPLES = """\
Examples:
  dpsim bench allreduce
  dpsim bench allreduce --devices 2 --min 4B --max 64MiB --factor 4
    --algorithm all --dtype float32 --output reports/allreduce
  dpsim bench allreduce --peers mpi,openmpi=/opt/env-openmpi
  dpsim bench allreduce --network shaped:4x200mbit
  dpsim bench allreduce --max 64KiB --peers none --plot small.png
  dpsim bench allreduce --algorithm star.py:star,ring-messages,mpi
  dpsim bench allreduce --backend cuda --devices 4 --max 256MiB --dtype bfloat16"""

_MOST_BETWEEN_HOSTS = 2**20


def group() -> App:
    """``dpsim bench`` with its command."""
    app = flags.group("bench", "How fast one operation is here, compared with memory's limit and with peers.", EXAMPLES)
    flags.command(app, allreduce, _ALLREDUCE_EXAMPLES)
    return app


class BenchFlags(flags.Flags):
    """The flags of a benchmark."""

    devices: int | None = flags.flag("Number of devices: ranks on this machine (2), or logical devices on a GPU.")
    min: str | None = flags.flag("The smallest size (one element).")
    max: str | None = flags.flag("The largest size, like 1GiB (64MiB).")
    factor: int | None = flags.flag("Ratio of one size to the one before (4).")
    algorithm: str | None = flags.flag(
        "all (the default), or a list of dpsim's own algorithms, and of your own: FILE.py:FUNCTION."
    )
    dtype: str | None = flags.flag("float32 (the default) or float64; on GPUs also float16 or bfloat16.")
    backend: Backend | None = flags.flag("cpu (the default) or cuda.")
    network: str | None = flags.flag("node, or hosts whose links are shaped, like shaped:4x200mbit (node).")
    peers: str | None = flags.flag(
        "none, or a list of auto (all that are installed), mpi, gloo, nccl, and NAME=FOLDER: a virtual environment with"
        " another MPI library, or with PyTorch for gloo."
    )
    budget: str | None = flags.flag("Time to spend on measuring, like 60s; at least three rounds are measured.")
    wait_until_quiet: flags.WaitUntilQuiet = None
    output: Path | None = flags.flag("Folder for the record with all samples, and the report.")
    json: flags.Json = False
    plot: Path | None = flags.flag("Draw the bandwidths into this file, .png or .svg.")


def allreduce(*, given: BenchFlags) -> int:
    """Check and time every allreduce, as a fraction of what memory allows.

    MPI's allreduce, gloo and NCCL are compared if they are installed, each in
    processes of its own and with its best setting; all take turns. Exits with 1
    if a sum was wrong.
    """
    from dpsim import codec
    from dpsim.folder_lock import locked
    from dpsim.harness.bench.measure import measure
    from dpsim.harness.bench.result import result as result_of
    from dpsim.harness.load import KINDS
    from dpsim.network import NODE, Network
    from dpsim.records.bench import RECORD, AllreduceBench
    from dpsim.report.bench import bandwidth_chart
    from dpsim.report.saved import SavedResult

    flags.writable(given.output, folders=("bench",))
    outputs.drawable(given.plot)
    hosts = Network.parse(given.network or NODE).hosts or None
    peers, environments = _peers(given.peers)
    fields = readers.provided(
        network=given.network,
        devices=hosts if given.devices is None else given.devices,
        min_bytes=_size("--min", given.min),
        max_bytes=_size("--max", given.max) or (hosts and _MOST_BETWEEN_HOSTS),
        factor=given.factor,
        algorithms=_algorithms(given.algorithm, given.backend or "cpu", given.network or NODE),
        dtype=given.dtype,
        backend=given.backend,
        peers=peers,
        peer_envs=environments,
        budget_s=readers.budget(given.budget),
    )
    with locked(given.output):
        with show.measuring(given.wait_until_quiet) as progress:
            record = measure(AllreduceBench(**fields), progress)
        if given.output is not None:
            codec.write_record(given.output / RECORD, record)
        result = result_of(record)
        show.result(SavedResult(KINDS["bench"], result), given.output, json=given.json, command="bench allreduce")
    if given.plot is not None:
        outputs.draw_plot(given.plot, bandwidth_chart(result))
    return 1 if result.wrong else 0


def _size(flag: str, text: str | None) -> int | None:
    import math

    from dpsim.errors import ConfigError
    from dpsim.units import parse_size

    size = None if text is None else parse_size(text)
    if size is not None and not 1 <= size < math.inf:
        raise ConfigError(f"{flag} is {text!r}", allowed="1 byte or more", remedy="write it like 4B, 64KiB or 64MiB")
    return None if size is None else int(size)


def _algorithms(text: str | None, backend: Backend, network: str) -> tuple[str, ...] | None:
    """Return the algorithms of a list; ``all`` in it stands for dpsim's own."""
    from dpsim.study.runners.allreduce.algorithms import bench_algorithms

    names = readers.listed("--algorithm", text, str)
    if names is None or "all" not in names:
        return names
    own = bench_algorithms(backend, network)
    return (*own, *(name for name in names if name not in ("all", *own)))


def _peers(text: str | None) -> tuple[tuple[str, ...] | None, dict[str, str]]:
    """Return the peers of a list (None: all), and the folders of those that have one."""
    from dpsim.errors import ConfigError

    if text == "none":
        return (), {}
    pairs = [part.partition("=") for part in readers.listed("--peers", text, str) or ("auto",)]
    if not all(name and bool(folder) == bool(equals) for name, equals, folder in pairs):
        raise ConfigError(
            f"--peers is {text!r}", allowed="names and NAME=FOLDER", remedy="write it like mpi,openmpi=/opt/env-openmpi"
        )
    names = tuple(name for name, _, _ in pairs)
    return None if "auto" in names else names, {name: folder for name, equals, folder in pairs if equals}
