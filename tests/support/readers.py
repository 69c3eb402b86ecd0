"""Every reader of dpsim, with whole files and texts of its kind: ``tests/test_readers.py`` damages them."""

from __future__ import annotations

import functools
import gzip
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpsim import codec, machine, units, workload
from dpsim.choices import SCHEMA as CHOICES_SCHEMA
from dpsim.choices import Choice, Choices, Problem
from dpsim.cli.job import said
from dpsim.collective import parse_devices
from dpsim.data import load_dataset
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
from dpsim.torch.script.kineto.workload import read_trace
from dpsim.validation.case import read_cases
from dpsim.validation.published import read_sets

ROOT = Path(__file__).parents[2]
Build = Callable[[str], object]

TEXTS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "size": (units.parse_size, ("64KiB", "1MiB", "25MB", "inf", "0")),
    "duration": (units.parse_duration, ("4s", "50us", "1.5ms")),
    "devices": (parse_devices, ("8", "2x4", "1024x8")),
    "network": (Network.parse, ("node", "paced:50us,1gbit")),
    "schedule": (parse_decay, ("constant", "step:10,15,gamma=0.2", "cosine:0.01")),
    "model": (
        lambda text: build_model(text, (8, 8, 1), 3),
        ("mlp:512,256", "mlp:64x20", "cnn:4,6,norm=group", "resnet20:norm=group,dropout=0.1,crop=4,flip=0.5"),
    ),
    "data set": (load_dataset, ("synthetic:6x5x2,classes=3,train=45,test=31", "digits", "npz:a.npz", "mnist:x")),
}
"""Readers of tokens, with tokens."""


class Reader(NamedTuple):
    """A reader of ``files``, one of which is damaged."""

    read: Callable[[], object]
    files: tuple[Path, ...]


Setup = Callable[[Path], Reader]
"""Writes the whole files of a reader into a folder."""


def _of_file(read: Callable[[Path], object], source: str) -> Setup:
    def setup(folder: Path) -> Reader:
        path = Path(shutil.copy(ROOT / source, folder))
        return Reader(functools.partial(read, path), (path,))

    return setup


def _of_folder(read: Callable[[Path], object], *sources: str) -> Setup:
    def setup(folder: Path) -> Reader:
        files = tuple(Path(shutil.copy(ROOT / source, folder)) for source in sources)
        return Reader(functools.partial(read, folder), files)

    return setup


def _of_bytes(read: Callable[[Path], object], name: str, data: Callable[[], bytes]) -> Setup:
    def setup(folder: Path) -> Reader:
        path = folder / name
        path.write_bytes(data())
        return Reader(functools.partial(read, path), (path,))

    return setup


def _reads(noun: type[codec.Noun], schema: str) -> Callable[[Path], object]:
    return lambda path: codec.read(path, noun, noun.__name__.lower(), schema)


def _tables(folder: Path) -> object:
    """Return the tables that a report shows of the records in a folder."""
    saved = load(folder)
    return saved.frame(), saved.samples()


def _predictions() -> sweep.Predictions:
    return sweep.read_predictions(ROOT / "reports/devices/predictions.json")


def _samples() -> bytes:
    """Return the samples of an interrupted run of a sweep that has results."""
    predictions, results = _predictions(), sweep.read_results(ROOT / "reports/devices/results.json")
    samples = Samples(
        points=results.points,
        spent_s=1.0,
        measured_from=results.measured_from,
        experiment=predictions.experiment,
        predictions_sha256=codec.digest(predictions),
        recording_s_per_event=0.0,
    )
    return codec.record_text(samples).encode()


def _choices() -> bytes:
    problem = Problem(operation="product", dtype="float32", rows=8, sizes=(4, 4))
    chosen = Choice(problem=problem, candidate="numpy", time_ratios={"numpy": 1.0})
    return codec.record_text(Choices(measured_on="x", kernels=(chosen,))).encode()


def _checkpoint() -> bytes:
    plan = Plan(devices=1, global_batch=1)
    header = checkpoint.Header(step=3, epoch=0, batch=3, seed=0, training_samples=7, plan=plan, run={"seed": 0})
    tensors: dict[str, Array] = {"parameters/a": np.ones((3, 2), np.float32), "losses": np.zeros(3)}
    return checkpoint.encode(checkpoint.Checkpoint(header=header, tensors=tensors))


def _published(folder: Path) -> Reader:
    own = Path(shutil.copytree(ROOT / "experiments/validation_example", folder / "validation"))
    declared = sorted(path for name in ("sets", "cases") for path in (own / name).iterdir())
    return Reader(lambda: read_cases(read_sets(own), own), tuple(declared))


def _watched(folder: Path) -> Reader:
    ranks = [Path(shutil.copy(path, folder)) for path in sorted((ROOT / "tests/torch_script/watched").iterdir())]
    return Reader(lambda: said(ranks), tuple(ranks))


def _arrays() -> tuple[Array, Array]:
    return np.arange(30 * 4, dtype=np.uint8).reshape(30, 2, 2), np.arange(30, dtype=np.int64) % 3


def _npz(save: Callable[..., None]) -> Setup:
    def setup(folder: Path) -> Reader:
        x, y = _arrays()
        save(path := folder / "data.npz", x=x.astype(np.float32), y=y)
        return Reader(lambda: load_dataset(f"npz:{path}"), (path,))

    return setup


def _npy(folder: Path) -> Reader:
    files = folder / "x.npy", folder / "y.npy"
    for path, array in zip(files, _arrays(), strict=True):
        np.save(path, array)
    return Reader(lambda: load_dataset(f"npy:{files[0]},{files[1]}"), files)


def _mnist(pack: Callable[[bytes], bytes], suffix: str) -> Setup:
    def setup(folder: Path) -> Reader:
        x, y = _arrays()
        files = []
        for part in ("train", "t10k"):
            for name, array in (("images-idx3-ubyte", x), ("labels-idx1-ubyte", y.astype(np.uint8))):
                files.append(folder / f"{part}-{name}{suffix}")
                head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
                files[-1].write_bytes(pack(head + array.tobytes()))
        return Reader(lambda: load_dataset(f"mnist:{folder}"), tuple(files))

    return setup


def _cifar10(folder: Path) -> Reader:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    files = tuple(folder / f"{name}.bin" for name in names)
    for path in files:
        path.write_bytes(bytes(3073) + b"\x01" + bytes(3072))
    return Reader(lambda: load_dataset(f"cifar10:{folder}"), files)


def _steps(path: Path) -> object:
    return measured_steps(read_rows(path), machine.read(ROOT / "experiments/machines/k80_10gbe.toml"))


def _log(path: Path) -> object:
    return import_machine(ImportConfig(files=(str(path),), devices=() if path.suffix == ".json" else (2,)))


def _grid(path: Path) -> object:
    return plan_text(Study.of(sweep.read_experiment(path)))


_LOGS = sorted((ROOT / "experiments/machines/benchmarks").iterdir())
_TRACE = ROOT / "tests/torch_script/traces/gloo_rank0.json.gz"
_STEPS = b"devices,local_batch,step_s\n1,32,20ms\n8,32,30ms\n"
_DEVICES = tuple(f"reports/devices/{name}.json" for name in ("predictions", "results", "drift"))
_STRATEGIES = tuple(f"reports/strategies/{name}.json" for name in ("predictions", "results"))

READERS: dict[str, Setup] = {
    "workload": _of_file(workload.read, "experiments/machines/googlenet_k80.toml"),
    "machine": _of_file(machine.read, "experiments/machines/k80_10gbe.toml"),
    "grid": _of_file(_grid, "experiments/sweeps/devices.toml"),
    "joint grid": _of_file(_grid, "experiments/sweeps/joint.toml"),
    "quality study": _of_file(quality.read_study, "experiments/quality/quick.toml"),
    "convergence": _of_file(convergence.read, "reports/accuracy/quality/convergence.json"),
    "kernel table": _of_file(_reads(KernelTable, TABLE_SCHEMA), "dpsim/nn/kernel_table.toml"),
    "quality": _of_folder(quality.read_quality, "reports/batch-norm/quality/quality.json"),
    "predictions": _of_file(sweep.read_predictions, "reports/ddp/predictions.json"),
    "results": _of_file(sweep.read_results, "reports/ddp/results.json"),
    "benchmark": _of_file(lambda path: result(bench.read(path)), "reports/allreduce/allreduce.json"),
    "reproduction": _of_file(
        lambda path: content(reproduce.read(path)), "reports/reproducibility/plain/reproduce.json"
    ),
    "devices": _of_folder(_tables, *_DEVICES),
    "strategies": _of_folder(_tables, *_STRATEGIES),
    "comparison": _of_folder(lambda own: compare_runs([ROOT / "reports/devices", own], ("a", "b")), *_DEVICES),
    "samples": _of_bytes(lambda path: samples_before(path, _predictions(), no_progress), "samples.json", _samples),
    "choices": _of_bytes(_reads(Choices, CHOICES_SCHEMA), "choices.json", _choices),
    **{path.name: _of_file(_log, str(path.relative_to(ROOT))) for path in _LOGS},
    "trace": _of_bytes(lambda path: read_trace(path, 32), "trace.json", lambda: gzip.decompress(_TRACE.read_bytes())),
    "hostfile": _of_bytes(hosts.read_hostfile, "hosts", lambda: b"node1:4\n# a comment\nnode2 slots=8\nlocalhost\n"),
    "checkpoint": _of_bytes(lambda path: stored(checkpoint.read(path)), "checkpoint-3.safetensors", _checkpoint),
    "measured steps": _of_bytes(_steps, "steps.csv", lambda: _STEPS),
    "published sets": _published,
    "watched job": _watched,
    "stored npz": _npz(np.savez),
    "deflated npz": _npz(np.savez_compressed),
    "npy": _npy,
    "mnist": _mnist(bytes, ""),
    "packed mnist": _mnist(gzip.compress, ".gz"),
    "cifar10": _cifar10,
}
