"""Damaged files and texts for every reader, which must raise an error of dpsim's own or return something usable."""

from __future__ import annotations

import functools
import gzip
import multiprocessing
import random
import re
import resource
import shutil
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import psutil

from dpsim import codec, machine, units, workload
from dpsim.choices import SCHEMA as CHOICES_SCHEMA
from dpsim.choices import Choice, Choices, Problem
from dpsim.cli.job import said
from dpsim.collective import parse_devices
from dpsim.data import load_dataset
from dpsim.errors import DpsimError
from dpsim.experiments.command import ROOT
from dpsim.experiments.stress.tally import Outcome
from dpsim.harness.bench.result import result
from dpsim.harness.compare.ratios import compare_runs
from dpsim.harness.load import load
from dpsim.harness.sweep.sweep import Study, plan_text
from dpsim.harness.train.resume import stored
from dpsim.imports import ImportConfig, import_machine
from dpsim.imports.steps import measured_steps, read_rows
from dpsim.launch import hosts
from dpsim.learning_rate import parse_decay
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.nn.implementations import TABLE_SCHEMA, KernelTable
from dpsim.plan import Plan
from dpsim.progress import no_progress
from dpsim.records import bench, convergence, quality, reproduce, sweep
from dpsim.replica import Array
from dpsim.report.reproduce import content
from dpsim.runtime import checkpoint
from dpsim.study.task import Samples, samples_before
from dpsim.torch_ddp.kineto.workload import read_trace
from dpsim.validation.case import read_cases
from dpsim.validation.published import read_sets

HANG_S, IDLE_S = 20.0, 120.0
"""A case hangs after so many seconds of computing, or of the clock: other programs may run on this machine, too."""
MEMORY_BYTES = 10**9

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_NUMBERS = (
    b"9" * 5000,
    b"0." + b"1" * 5000,
    *b"-1 0 1e999 -1e999 NaN Infinity 1e308 1e-320 18446744073709551616 99999999999 2147483648".split(),
    *b'null "inf" "x" [] {} true'.split(),
)
_PIECES = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[31m", b"\r", "é\u2028".encode()),
    *(b" " * 100_000, b"#" * 1000, b"../" * 100, b"A" * 10_000),
    *b"""= , : %s%n \\ '"`$(id) "\\ud800" """.split(),
)
_DEEP = (1_000, 20_000)


def damaged(data: bytes, moments: random.Random) -> bytes:
    """Return ``data`` damaged in one to four places, half of them in its first 400 bytes."""
    for _ in range(moments.choice((1, 1, 1, 2, 4))):
        head = min(len(data), 400) if moments.random() < 0.5 else len(data)
        at = moments.randint(0, head)
        start, end, new = at, at, b""
        match moments.choice(("cut", "overwrite", "insert", "delete", "renumber", "deepen", "double")):
            case "cut":
                end = len(data)
            case "overwrite":
                new = moments.randbytes(moments.randint(1, 9))
                end = at + len(new)
            case "insert":
                new = moments.choice(_PIECES)
            case "delete":
                end = at + moments.randint(1, 12)
            case "renumber" if number := _NUMBER.search(data, at):
                (start, end), new = number.span(), moments.choice(_NUMBERS)
            case "deepen":
                number, depth = _NUMBER.search(data, at), moments.choice(_DEEP)
                start, end = number.span() if number else (at, at)
                close = moments.choice((b"", b"]" * depth))
                new = moments.choice((b"[", b'{"a":')) * depth + b"1" + close
            case "double":
                end = at + moments.choice((10, 100, 1000))
                new = data[at:end] * moments.choice((2, 50))
        data = data[:start] + new + data[end:]
    return data


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A reader of ``files``, one of which is drawn to be damaged."""

    name: str
    files: tuple[Path, ...]
    read: Callable[[], object]


def _text_readers() -> dict[str, tuple[Callable[[str], object], tuple[str, ...]]]:
    """Return readers of tokens, with tokens."""
    shape = (8, 8, 1)
    return {
        "size": (units.parse_size, ("64KiB", "1MiB", "25MB", "inf", "0")),
        "duration": (units.parse_duration, ("4s", "50us", "1.5ms")),
        "devices": (parse_devices, ("8", "2x4", "1024x8")),
        "network": (Network.parse, ("node", "paced:50us,1gbit")),
        "schedule": (parse_decay, ("constant", "step:10,15,gamma=0.2", "cosine:0.01")),
        "model": (
            lambda text: build_model(text, shape, 3),
            ("mlp:512,256", "mlp:64x20", "cnn:4,6,norm=group", "resnet20:norm=group,dropout=0.1,crop=4,flip=0.5"),
        ),
        "data set": (load_dataset, ("synthetic:6x5x2,classes=3,train=45,test=31", "digits", "npz:a.npz", "mnist:x")),
    }


def _readers(folder: Path) -> list[Reader]:
    """Return every reader, with whole files of its kind written into ``folder``."""
    readers: list[Reader] = []

    def add(name: str, read: Callable[..., object], *files: Path, given: object = None) -> None:
        """Add a reader that is called with ``given``, or else with its file."""
        readers.append(Reader(name=name, files=files, read=functools.partial(read, given or files[0])))

    def read_grid(path: Path) -> object:
        return plan_text(Study.of(sweep.read_experiment(path)))

    single: dict[str, tuple[Callable[[Path], object], str]] = {
        "workload": (workload.read, "experiments/machines/googlenet_k80.toml"),
        "machine": (machine.read, "experiments/machines/k80_10gbe.toml"),
        "grid": (read_grid, "experiments/sweeps/devices.toml"),
        "joint grid": (read_grid, "experiments/sweeps/joint.toml"),
        "quality study": (quality.read_study, "experiments/quality/quick.toml"),
        "convergence": (convergence.read, "reports/accuracy/quality/convergence.json"),
        "kernel table": (_reads(KernelTable, TABLE_SCHEMA), "dpsim/nn/kernel_table.toml"),
        "quality": (lambda path: quality.read_quality(path.parent), "reports/batch-norm/quality/quality.json"),
        "predictions": (sweep.read_predictions, "reports/ddp/predictions.json"),
        "results": (sweep.read_results, "reports/ddp/results.json"),
        "benchmark": (lambda path: result(bench.read(path)), "reports/allreduce/allreduce.json"),
        "reproduction": (lambda path: content(reproduce.read(path)), "reports/reproducibility/plain/reproduce.json"),
    }
    for name, (read, source) in single.items():
        add(name, read, _copied(ROOT / source, folder / name))
    for question in ("devices", "strategies"):
        own = folder / question
        own.mkdir()
        sources = (ROOT / f"reports/{question}/{name}.json" for name in ("predictions", "results", "drift"))
        add(
            question, _tables, *(_copied(source, own / source.stem) for source in sources if source.exists()), given=own
        )
    own, whole = folder / "devices", ROOT / "reports/devices"
    add("comparison", lambda own: compare_runs([whole, own], ("a", "b")), *sorted(own.iterdir()), given=own)
    predictions = sweep.read_predictions(own / "predictions.json")
    for name, value in (("samples", _samples(predictions, own)), ("choices", _choices())):
        codec.write(folder / f"{name}.json", value)
    add("samples", lambda path: samples_before(path, predictions, no_progress), folder / "samples.json")
    add("choices", _reads(Choices, CHOICES_SCHEMA), folder / "choices.json")
    for log in sorted((ROOT / "experiments/machines/benchmarks").iterdir()):
        path = _copied(log, folder / log.name)
        config = ImportConfig(files=(str(path),), devices=() if path.suffix == ".json" else (2,))
        add(log.name, import_machine, path, given=config)
    trace, hostfile = folder / "trace.json", folder / "hosts.txt"
    trace.write_bytes(gzip.decompress((ROOT / "tests/torch_ddp/traces/gloo_rank0.json.gz").read_bytes()))
    add("trace", lambda path: read_trace(path, 32), trace)
    hostfile.write_text("node1:4\n# a comment\nnode2 slots=8\nlocalhost\n")
    add("hostfile", hosts.read_hostfile, hostfile)
    add("checkpoint", lambda path: stored(checkpoint.read(path)), _checkpoint(folder))
    _add_published(add, folder)
    for token, files in _data_sets(folder).items():
        add(token.partition(":")[0], load_dataset, *files, given=token)
    return readers


def _add_published(add: Callable[..., None], folder: Path) -> None:
    """Add the readers of published sets, measured steps and the records of a watched job."""
    own = Path(shutil.copytree(ROOT / "experiments/validation_example", folder / "validation"))
    declared = sorted(path for name in ("sets", "cases") for path in (own / name).iterdir())
    add("published sets", lambda own: read_cases(read_sets(own), own), *declared, given=own)
    steps, link = folder / "steps.csv", machine.read(ROOT / "experiments/machines/k80_10gbe.toml")
    steps.write_text("devices,local_batch,step_s\n1,32,20ms\n8,32,30ms\n", encoding="utf-8")
    add("measured steps", lambda path: measured_steps(read_rows(path), link), steps)
    ranks = [_copied(path, folder / path.stem) for path in sorted((ROOT / "tests/torch_ddp/watched").iterdir())]
    add("watched job", said, *ranks, given=ranks)


def _reads(noun: type[codec.Noun], schema: str) -> Callable[[Path], object]:
    return lambda path: codec.read(path, noun, noun.__name__.lower(), schema)


def _tables(folder: Path) -> object:
    """Return the tables that a report shows of the records in a folder."""
    saved = load(folder)
    return saved.frame(), saved.samples()


def _samples(predictions: sweep.Predictions, folder: Path) -> Samples:
    """Return the samples of an interrupted run of a sweep that has results."""
    results = sweep.read_results(folder / "results.json")
    return Samples(
        points=results.points,
        spent_s=1.0,
        measured_from=results.measured_from,
        experiment=predictions.experiment,
        predictions_sha256=codec.digest(predictions),
        recording_s_per_event=0.0,
    )


def _choices() -> Choices:
    problem = Problem(operation="product", dtype="float32", rows=8, sizes=(4, 4))
    return Choices(measured_on="x", kernels=(Choice(problem=problem, candidate="numpy", time_ratios={"numpy": 1.0}),))


def _copied(source: Path, target: Path) -> Path:
    path = target.with_suffix(source.suffix)
    path.write_bytes(source.read_bytes())
    return path


def _checkpoint(folder: Path) -> Path:
    path, plan = folder / "checkpoint-3.safetensors", Plan(devices=1, global_batch=1)
    header = checkpoint.Header(step=3, epoch=0, batch=3, seed=0, training_samples=7, plan=plan, run={"seed": 0})
    tensors: dict[str, Array] = {"parameters/a": np.ones((3, 2), np.float32), "losses": np.zeros(3)}
    path.write_bytes(checkpoint.encode(checkpoint.Checkpoint(header=header, tensors=tensors)))
    return path


def _data_sets(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Write small data sets of every kind; their files, by the token that names the data set."""
    x, y = np.arange(30 * 4, dtype=np.uint8).reshape(30, 2, 2), np.arange(30, dtype=np.int64) % 3
    np.savez(folder / "stored.npz", x=x.astype(np.float32), y=y)
    np.savez_compressed(folder / "deflated.npz", x=x, y=y)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    files: dict[str, tuple[Path, ...]] = {
        f"npz:{folder}/{name}.npz": (folder / f"{name}.npz",) for name in ("stored", "deflated")
    }
    files[f"npy:{folder}/x.npy,{folder}/y.npy"] = (folder / "x.npy", folder / "y.npy")
    for kind, pack, suffix in (("plain", bytes, ""), ("gz", gzip.compress, ".gz")):
        parts, inside = [], folder / kind
        inside.mkdir(exist_ok=True)
        for part in ("train", "t10k"):
            for name, array in (("images-idx3-ubyte", x), ("labels-idx1-ubyte", y.astype(np.uint8))):
                parts.append(inside / f"{part}-{name}{suffix}")
                head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
                parts[-1].write_bytes(pack(head + array.tobytes()))
        files[f"mnist:{inside}"] = tuple(parts)
    cifar = folder / "cifar"
    cifar.mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    files[f"cifar10:{cifar}"] = tuple(cifar / f"{name}.bin" for name in names)
    for path in files[f"cifar10:{cifar}"]:
        path.write_bytes(bytes(3073) + b"\x01" + bytes(3072))
    return files


def case(number: int, seed: int, readers: list[Reader], whole: dict[Path, bytes]) -> Outcome:
    """Read one damaged file, or every third time one damaged text."""
    moments = random.Random(f"{seed} {number}")
    if number % 3 == 0:
        name = moments.choice(sorted(_text_readers()))
        read, tokens = _text_readers()[name]
        token = damaged(moments.choice(tokens).encode(), moments).decode("utf-8", "surrogateescape")
        return _outcome(f"{number} {name}", lambda: read(token))
    reader = moments.choice(readers)
    path = moments.choice(reader.files)
    path.write_bytes(damaged(whole[path], moments))
    before = {each: _state(each) for each in whole}
    try:
        outcome = _outcome(f"{number} {reader.name}", reader.read)
        if written := [each.name for each, state in before.items() if _state(each) != state]:
            outcome = msgspec.structs.replace(outcome, wrong=f"it wrote {', '.join(written)} {outcome.wrong}")
        return outcome
    finally:
        path.write_bytes(whole[path])


def _state(path: Path) -> tuple[int, ...]:
    """Return what differs if a file was written, replaced or (then it is empty) removed."""
    if not path.exists():
        return ()
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _outcome(name: str, read: Callable[[], object]) -> Outcome:
    try:
        read()
    except DpsimError as error:
        wrong = "" if error.given.strip() else "an error without words"
        return Outcome(case=name, became="refused", wrong=wrong)
    except Exception as error:  # what a user would see as a traceback
        place = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__}: {str(error)[:200]} ({Path(place.filename).name}:{place.lineno})"
        return Outcome(case=name, became="traceback", wrong=wrong)
    return Outcome(case=name, became="read")


def _serve(first: int, last: int, seed: int, folder: str, connection: Connection) -> None:
    """Send the outcome and the peak memory of one case after another."""
    readers = _readers(Path(folder))
    whole = {path: path.read_bytes() for reader in readers for path in reader.files}
    for number in range(first, last):
        outcome = case(number, seed, readers, whole)
        connection.send((codec.to_builtins(outcome), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


Serve = Callable[[int, int, int, str, Connection], None]
"""A function that sends the outcome and the peak memory of cases ``first`` to ``last``, in order."""


def run(first: int, last: int, seed: int, folder: Path, serve: Serve = _serve) -> Iterator[Outcome]:
    """Yield the outcomes of a process that is replaced where a case hangs, crashes or takes too much memory."""
    spawn = multiprocessing.get_context("spawn")
    while first < last:
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=serve, args=(first, last, seed, str(folder), sender))
        process.start()
        sender.close()
        try:
            for outcome in _listen(first, last, psutil.Process(process.pid), receiver):
                first += 1
                yield outcome
        finally:
            process.kill()
            process.join()
            receiver.close()


def _listen(first: int, last: int, process: psutil.Process, receiver: Connection) -> Iterator[Outcome]:
    """Yield outcomes as they arrive, until the process hangs, crashes or is too large."""
    at_start = 0
    for number in range(first, last):
        if not _answers(process, receiver):
            yield Outcome(case=str(number), became="hang", wrong=f"no answer after {HANG_S:.0f} s of computing")
            return
        try:
            outcome, peak_bytes = receiver.recv()
        except EOFError:
            yield Outcome(case=str(number), became="crash", wrong="the process ended")
            return
        at_start = at_start or peak_bytes
        if peak_bytes - at_start > MEMORY_BYTES:
            yield Outcome(case=outcome["case"], became="memory", wrong=f"{(peak_bytes - at_start) / 1e9:.1f} GB")
            return
        yield codec.decode(outcome, Outcome, "outcome")


def _answers(process: psutil.Process, receiver: Connection) -> bool:
    """Return whether a process sends an outcome, or ends, in time."""
    begun_s, until = process.cpu_times().user, time.monotonic() + IDLE_S
    while not receiver.poll(1.0):
        if process.cpu_times().user - begun_s > HANG_S or time.monotonic() > until:
            return False
    return True
