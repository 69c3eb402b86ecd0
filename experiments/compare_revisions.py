"""``python -m dpsim.experiments.compare_revisions --base REV`` shows that a refactoring changes nothing users rely on.

It checks REV out into a temporary worktree, runs that tree and this one in turn by their command lines, and compares:

- ``flags``: commands, flags, choices and defaults of every ``--help``; exit codes and allowed values of mistakes;
- ``predictions``: every number of ``dpsim predict --json``, to 1e-12;
- ``json``: what the other commands print with ``--json`` and write to files: the values where they are deterministic,
  otherwise the names and types of all fields;
- ``digests``: the weights after training;
- ``files``: whether this tree reads the checkpoints, records and other files that REV wrote;
- ``speed`` (only on request): the median step time of this tree over that of REV.

It exits with 1 where anything differs but the speed or the prose of a help text. All checks take 8 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpsim.errors import DpsimError
from dpsim.harness.measurement.statistics import median_ratio

TOLERANCE = 1e-12
MEASURED = frozenset({"images_per_s", "step_s", "exposed_communication_s"})
"""Fields of ``dpsim train --json`` that differ from run to run."""
SPEED, SPEED_ROUNDS = "speed", 9
T = TypeVar("T")
_SHOWN = 5
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Difference:
    """A value that is not the same in both trees, and its place: the command, then the path of the field."""

    place: str
    old: str
    new: str


@dataclass(frozen=True)
class Comparison:
    """How many values were compared, and which differ. ``notes`` do not count as differences."""

    compared: int = 0
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.compared + other.compared, self.differences + other.differences, self.notes + other.notes
        )


def _single(place: str, old: object, new: object, *, equal: bool) -> Comparison:
    return Comparison(1, () if equal else (Difference(place, _shortened(old), _shortened(new)),))


def _shortened(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def compare_values(old: Any, new: Any, place: str, measured: frozenset[str] = frozenset()) -> Comparison:
    """Compare two JSON values: numbers to a relative ``TOLERANCE``, everything else exactly.

    Of fields whose names are in ``measured`` only the structure is compared.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        total = Comparison()
        for key in old | new:
            here = f"{place}.{key}"
            if key not in old or key not in new:
                total += _single(here, old.get(key, "absent"), new.get(key, "absent"), equal=False)
            elif key in measured:
                total += compare_structures(old[key], new[key], here)
            else:
                total += compare_values(old[key], new[key], here, measured)
        return total
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return _single(place, f"{len(old)} entries", f"{len(new)} entries", equal=False)
        pairs = enumerate(zip(old, new, strict=True))
        return sum((compare_values(a, b, f"{place}[{i}]", measured) for i, (a, b) in pairs), Comparison())
    if type(old) is float and type(new) is float:
        both_nan = math.isnan(old) and math.isnan(new)
        return _single(place, old, new, equal=both_nan or math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=0.0))
    return _single(place, old, new, equal=type(old) is type(new) and old == new)


def structure(value: Any, place: str = "") -> dict[str, set[str]]:
    """The types of all fields of a JSON value, by path. The entries of a list share the path that ends in ``[]``."""
    if isinstance(value, dict):
        types = {place: {"object"}}
        children = [(f"{place}.{key}", child) for key, child in value.items()]
    elif isinstance(value, list):
        types = {place: {"list"}}
        children = [(f"{place}[]", child) for child in value]
    else:
        return {place: {_type_name(value)}}
    for path, child in children:
        for inner, names in structure(child, path).items():
            types.setdefault(inner, set()).update(names)
    return types


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) or value in ("inf", "-inf", "nan") else "string"


def compare_structures(old: Any, new: Any, place: str) -> Comparison:
    """Compare field names and types. A null and an empty list agree with everything: they show no type."""
    old_types, new_types = structure(old), structure(new)
    total = Comparison()
    for path in old_types | new_types:
        if path in old_types and path in new_types:
            types = old_types[path] - {"null"}, new_types[path] - {"null"}
            if all(types):
                total += _single(place + path, *(" or ".join(sorted(t)) for t in types), equal=types[0] == types[1])
        elif not path.endswith("[]"):
            lacking = old_types if path not in old_types else new_types
            if "object" in lacking.get(path.rpartition(".")[0], set()):
                states = ("present" if path in types else "absent" for types in (old_types, new_types))
                total += _single(place + path, *states, equal=False)
    return total


@dataclass(frozen=True)
class Help:
    """The rows of a ``--help``: commands and flags by name, each with its choices, default and ``[required]``."""

    commands: tuple[str, ...]
    options: dict[str, list[str]]
    descriptions: dict[str, str]


def parse_help(text: str) -> Help:
    """Read the boxes of a help text. A row that is indented deeply continues the description above it."""
    title, name = "", ""
    rows: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        if line.startswith("╭"):
            title, name = line.strip("╭╮─ "), ""
        elif line.startswith("│"):
            row = line.strip("│").rstrip()
            begin = re.match(r" ?(?:\*| )? {0,3}(\S+(?: \S+)*)(?: {2,}(.*))?$", row)
            if begin and len(row) - len(row.lstrip(" *")) <= 5:
                name = begin[1]
                rows[title, name] = begin[2] or ""
            elif name:
                rows[title, name] += " " + row.strip()
    commands = tuple(name for (title, name) in rows if title == "Commands" and not name.startswith("-"))
    flags = {name: description for (_, name), description in rows.items() if name not in commands}
    facts = {name: sorted(re.findall(r"\[[^\]]+\]", description)) for name, description in flags.items()}
    return Help(commands, facts, {name: description for (_, name), description in rows.items()})


def allowed_values(message: str) -> list[str]:
    """The values in the lines ``allowed: a, b, c`` of an error message, sorted."""
    lines = re.findall(r"^\s*allowed: (.*)$", message, re.MULTILINE)
    return sorted(value.strip() for line in lines for value in line.split(", "))


@dataclass(frozen=True)
class Tree:
    """A checkout, the folder that its commands run in, and its own cache of compiled kernels and measured choices."""

    source: Path
    folder: Path
    cache: Path

    def command(self, line: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a ``dpsim`` command with this tree's code."""
        return self._python("-m", "dpsim", *line.split(), cache=cache)

    def json(self, line: str, cache: Path | None = None) -> dict[str, Any]:
        """The exit code of a command and what it prints with ``--json``, or its error message."""
        done = self.command(f"{line} --json", cache)
        if done.returncode:
            return {"exit_code": done.returncode, "error": done.stderr.strip().splitlines()[-3:]}
        return {"exit_code": 0, "output": json.loads(done.stdout)}

    def output(self, line: str, cache: Path | None = None) -> dict[str, Any]:
        """As ``json``. Raises ``DpsimError`` where the command fails, for then there is nothing to compare with."""
        answer = self.json(line, cache)
        if answer["exit_code"]:
            raise DpsimError(f"dpsim {line} fails in {self.source}: {answer['error']}")
        return answer

    def check(self) -> None:
        """Raise ``DpsimError`` unless Python imports dpsim from this tree."""
        imported = self._python("-c", "import dpsim; print(dpsim.__file__)").stdout.strip()
        if imported != str(self.source / "dpsim" / "__init__.py"):
            raise DpsimError(f"Python imports dpsim from {imported!r}, not from {self.source}")

    def _python(self, *arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
        variables = {"PYTHONPATH": str(self.source), "DPSIM_CACHE_DIR": str(cache or self.cache)}
        # A fixed seed of hashes: the order of a set of strings, which a report may show, is then the same in every run.
        env = os.environ | variables | {"PYTHONHASHSEED": "0", "COLUMNS": "80"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=env,
            text=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )


@dataclass(frozen=True)
class Trees:
    """The old and the new tree. Their folders begin with the same input files, under the same relative paths."""

    old: Tree
    new: Tree

    def both(self, run: Callable[[Tree], T]) -> tuple[T, T]:
        return run(self.old), run(self.new)

    def commands(self, line: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        """Run a short command in both trees at the same time."""
        with ThreadPoolExecutor(2) as pool:
            old, new = pool.map(lambda tree: tree.command(line), (self.old, self.new))
        return old, new

    def values(self, line: str, measured: frozenset[str] = frozenset()) -> Comparison:
        """Compare the values that a command prints with ``--json``."""
        return compare_values(self.old.output(line), self.new.json(line), line, measured)

    def structures(self, line: str, files: Sequence[str] = ()) -> Comparison:
        """Compare the structure of what a command prints with ``--json``, and of the JSON files that it writes."""
        old, new = self.old.output(line), self.new.json(line)
        total = compare_values(old["exit_code"], new["exit_code"], f"{line}: exit code")
        total += compare_structures(old, new, line)
        for file in files:
            total += compare_structures(*self.read(file), f"{line}: {file}")
        return total

    def read(self, path: str) -> tuple[Any, Any]:
        """The JSON files that both trees wrote; ``"no file"`` where there is none."""

        def content(tree: Tree) -> Any:
            file = tree.folder / path
            return json.loads(file.read_text(encoding="utf-8")) if file.exists() else "no file"

        return self.both(content)

    def texts(self, path: str) -> Comparison:
        """Compare the lines of a text file that both trees wrote."""
        old, new = self.both(lambda tree: (tree.folder / path).read_text(encoding="utf-8").splitlines())
        return compare_values(old, new, path)

    def hand_over(self, name: str) -> None:
        """Copy a file or folder that the old tree wrote into the new tree's folder."""
        source, target = self.old.folder / name, self.new.folder / name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)


@contextlib.contextmanager
def checked_out(repository: Path, revision: str, folder: Path) -> Iterator[None]:
    """A temporary worktree of a revision, removed in the end. Raises ``DpsimError``."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)

    try:
        added = git("worktree", "add", "--detach", str(folder), revision)
        if added.returncode:
            raise DpsimError(f"git cannot check out {revision!r}: {added.stderr.strip()}")
        yield
    finally:
        git("worktree", "remove", "--force", str(folder))


_K80 = "--workload googlenet_k80.toml --machine k80_10gbe.toml"
_OWN = "--workload workload.json --machine machine.json"
_RULES = "--fusion-rule tarantella,ddp,horovod,mg-wfbp,per-tensor,one --fusion-threshold 0,32KiB,1MiB,inf"
_SWEEP = (
    "sweep fusion-threshold --model mlp:16x3 --devices 1,2 --network node,paced:50us,1gbit --fusion-threshold 0,inf"
    " --global-batch 64 --overlap off --budget 1500ms --output sweep"
)
_PROFILE = "profile --model mlp:16 --local-batch 8,16 --output profiled.json"
_CALIBRATE = "calibrate --devices 2 --overlap poll --budget 1ms --output calibrated.json"

MISTAKES = (
    "nonsense",
    *(
        f"predict {_K80} --devices 2 --{flag} nonsense"
        for flag in ("overlap", "algorithm", "fusion-rule", "wire-dtype", "global-batch", "nonsense")
    ),
    *(
        f"train --{flag} nonsense"
        for flag in ("model", "dataset", "network", "optimizer", "schedule", "batch-norm", "nonsense")
    ),
    f"predict {_K80} --devices 2 --fusion-rule mg-wfbp --fusion-threshold 0",
    "report nowhere",
    "machine show googlenet_k80.toml",
    "bench allreduce --peers nonsense",
)
"""Command lines that are refused. Their exit codes and the allowed values that they name are compared."""

PREDICTIONS = (
    f"{_K80} {_RULES} --devices 1,2,4,8 --algorithm mpi,ring --overlap thread",
    f"{_K80} {_RULES} --devices 2x4 --algorithm hierarchical,mpi --overlap off",
    f"{_OWN} {_RULES} --devices 1,2,4,8 --algorithm auto,one-shot,two-shot,mpi,ring --overlap poll"
    " --global-batch 64,96",
    f"{_OWN} {_RULES} --devices 1,2,4 --algorithm recursive-doubling,halving-doubling,direct,nccl --overlap inline"
    " --accumulate 2 --local-batch 8,20,64",
    f"{_OWN} {_RULES} --devices 2,4,8 --algorithm auto,direct,two-shot --overlap thread --wire-dtype bfloat16"
    " --cycle 5ms",
    f"{_OWN} {_RULES} --devices 2,4,2x4 --overlap auto --wire-dtype float16",
    f"{_OWN} {_RULES} --devices 2x4 --algorithm hierarchical,ring --overlap poll",
)
"""Flags of ``dpsim predict``."""

TRAININGS = (
    "--model mlp:32 --devices 1",
    "--model mlp:32 --devices 2 --overlap poll --fusion-threshold 0",
    "--model mlp:32 --devices 2 --wire-dtype bfloat16",
    "--model mlp:32,dropout=0.2 --devices 2 --overlap thread --network paced:50us,1gbit --label-smoothing 0.1",
    "--model cnn:8 --devices 2 --accumulate 2 --fusion-rule ddp",
    "--model cnn:8,flip=0.5 --devices 1 --optimizer adamw --accumulate 2 --batch-norm leaf",
    "--model resnet20:norm=group --devices 2 --global-batch 16 --optimizer adamw --schedule cosine --warmup-epochs 1",
    "--model resnet20 --devices 1 --global-batch 16 --batch-norm global --nesterov",
)
"""Flags of reproducible trainings, whose weights must be equal."""

PLAIN_TRAININGS = (
    "--model mlp:32 --devices 1",
    "--model mlp:32 --devices 2 --overlap poll",
    "--model mlp:32 --devices 2 --wire-dtype bfloat16 --optimizer adamw",
    "--model cnn:8 --devices 1 --accumulate 2",
)
"""Flags of trainings that choose their code by measurement. They are compared where two runs of the old tree agree."""

SPEEDS = {
    "mlp:64x20 on 2 devices": "--model mlp:64x20 --devices 2 --steps 300",
    "resnet20 on 1 device": "--model resnet20 --devices 1 --global-batch 16 --steps 100",
}


def compare_flags(trees: Trees) -> Comparison:
    """Commands, flags, choices and defaults of every ``--help``; exit codes and allowed values of mistakes."""
    total, waiting = Comparison(), [""]
    while waiting:
        command = waiting.pop(0)
        place = f"{command} --help".strip()
        old, new = (parse_help(done.stdout) for done in trees.commands(place))
        total += compare_values(sorted(old.commands), sorted(new.commands), f"{place}: commands")
        total += compare_values(old.options, new.options, place)
        reworded = sorted(name for name, text in old.descriptions.items() if new.descriptions.get(name, text) != text)
        if reworded:
            total += Comparison(notes=(f"{place} describes otherwise: {', '.join(reworded)}",))
        waiting += [f"{command} {name}".strip() for name in old.commands if name in new.commands]
    for mistake in MISTAKES:
        old_refusal, new_refusal = (_refusal(done) for done in trees.commands(mistake))
        total += compare_values(old_refusal, new_refusal, mistake)
    return total


def _refusal(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {"exit_code": done.returncode, "stdout": done.stdout, "allowed": allowed_values(done.stderr)}


def compare_predictions(trees: Trees) -> Comparison:
    """Every number that the model predicts."""
    return sum((trees.values(f"predict {flags}") for flags in PREDICTIONS), Comparison())


def compare_json(trees: Trees) -> Comparison:
    """What commands print with ``--json``, and the files that they write."""
    for tree in (trees.old, trees.new):
        shutil.copytree(trees.old.source / "reports/example", tree.folder / "example")
    total = trees.values("train --model cnn:8 --devices 2 --steps 4 --reproducible --output train.json", MEASURED)
    total += compare_values(*trees.read("train.json"), "train --output", MEASURED)
    for line in (
        "machine show k80_10gbe.toml",
        "machine show machine.json",
        "machine compare k80_10gbe.toml machine.json",
        "report example",
        "trace example --output trace.json",
        "reproduce --model mlp:32 --devices 1,2 --steps 3 --batch-norm leaf --fusion-threshold 0,inf",
    ):
        total += trees.values(line)
    total += compare_values(*trees.read("trace.json"), "trace --output")
    total += trees.structures("doctor")
    total += trees.structures(_PROFILE, ["profiled.json"]) + trees.structures(_CALIBRATE, ["calibrated.json"])
    total += trees.structures(
        "reproduce --model mlp:32 --devices 2 --steps 3 --leaves 0 --algorithm ring --output plain",
        ["plain/reproduce.json", "plain/predictions.json"],
    )
    total += trees.structures(
        "bench allreduce --devices 2 --max 4KiB --factor 32 --peers none --budget 1s --output bench",
        ["bench/allreduce.json"],
    )
    total += trees.structures(_SWEEP, ["sweep/predictions.json", "sweep/results.json"])
    old, new = trees.both(lambda tree: sorted(str(p.relative_to(tree.folder)) for p in tree.folder.rglob("*.*")))
    return total + compare_values(old, new, "files that the commands wrote")


def compare_digests(trees: Trees) -> Comparison:
    """Weights and losses after training."""
    total = Comparison()
    for flags in TRAININGS:
        total += trees.values(f"train {flags} --steps 3 --reproducible", MEASURED)
    second_cache = trees.old.folder.parent / "second-cache"
    for flags in PLAIN_TRAININGS:
        line = f"train {flags} --steps 3"
        first, second = _trained(trees.old.output(line)), _trained(trees.old.output(line, second_cache))
        if compare_values(first, second, line).differences:
            total += Comparison(notes=(f"not compared, as two runs of the old tree differ: {line}",))
        else:
            total += compare_values(first, _trained(trees.new.json(line)), line)
    return total


def _trained(answer: dict[str, Any]) -> dict[str, Any]:
    """The fields of a training that follow from its arithmetic alone."""
    if answer["exit_code"]:
        return answer
    point, summary = answer["output"]["points"][0], answer["output"]["summary"]
    fields = {key: summary[key] for key in ("digest", "test_accuracy", "final_loss")}
    return {"exit_code": 0, "losses": point["losses"]} | fields


def compare_files(trees: Trees) -> Comparison:
    """Whether the new tree reads what the old tree wrote: checkpoints, workload and machine files, records."""
    old, new = trees.old, trees.new
    total = Comparison()
    for run, flags in (("run1", "--model cnn:8 --devices 2"), ("run2", "--model resnet20:norm=group --devices 1")):
        train = f"train {flags} --global-batch 32 --reproducible --optimizer adamw"
        uninterrupted = _trained(old.output(f"{train} --steps 6"))
        old.output(f"{train} --steps 3 --checkpoint {run}")
        trees.hand_over(run)
        resumed = _trained(new.json(f"train --resume {run} --steps 6"))
        total += compare_values(uninterrupted, resumed, f"train --resume, after {train}")
    for line, file in ((_PROFILE, "profiled.json"), (_CALIBRATE, "calibrated.json")):
        old.output(line)
        trees.hand_over(file)
    files = "--workload profiled.json --machine calibrated.json"
    total += trees.values(f"predict {files} --devices 1,2 --fusion-threshold 0,1KiB,inf --overlap poll")
    if not (old.folder / "sweep").exists():
        old.output(_SWEEP)
    shutil.rmtree(new.folder / "sweep", ignore_errors=True)
    trees.hand_over("sweep")
    for name in ("devices", "allreduce/devices-4", "reproducibility/cnn"):
        shutil.copytree(old.source / "reports" / name, old.folder / name)
        shutil.copytree(old.source / "reports" / name, new.folder / name)
    for name in ("sweep", "devices", "allreduce/devices-4", "reproducibility/cnn"):
        total += trees.values(f"report {name}") + trees.texts(f"{name}/report.md")
    return total


CHECKS: Mapping[str, Callable[[Trees], Comparison]] = {
    "flags": compare_flags,
    "predictions": compare_predictions,
    "json": compare_json,
    "digests": compare_digests,
    "files": compare_files,
}


def compare_speed(trees: Trees, cache: Path) -> dict[str, Any]:
    """Median step time of the new tree over that of the old one, in paired rounds, with a 95 % interval.

    Both trees share a cache, so that they compute with the same measured choices. The first round does not count.
    Raises ``DpsimError``.
    """
    ratios: dict[str, Any] = {}
    order = random.Random(0)
    for name, flags in SPEEDS.items():
        step_s: dict[str, list[float]] = {"old": [], "new": []}
        for number in range(SPEED_ROUNDS + 1):
            for side, tree in order.sample([("old", trees.old), ("new", trees.new)], 2):
                answer = tree.output(f"train {flags}", cache)
                if number > 0:
                    step_s[side].append(answer["output"]["summary"]["step_s"])
        ratio = median_ratio(step_s["new"], step_s["old"])
        ratios[name] = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "step_s": step_s}
    return ratios


def own_workload() -> dict[str, Any]:
    """A workload with two local batches, early gradients, batch norm, launch times and tensors of two types."""
    layers = []
    for i in range(8):
        tensors = [
            {"name": f"weight{i}", "shape": [64, 9 * 2**i], "dtype": "float32"},
            {"name": f"bias{i}", "shape": [64], "dtype": "float64" if i == 3 else "float32"},
        ]
        unit_s = [(1 + i) * batch * 1.1e-5 for batch in (8, 32)]
        layers.append(
            {
                "name": f"layer{i}",
                "kind": "convolution",
                "tensors": tensors,
                "forward_s": unit_s,
                "backward_s": [2.1 * unit for unit in unit_s],
                "gradient_ready_s": [1.7 * unit for unit in unit_s] if i % 2 else None,
                "launch_s": 1e-5 * (i % 3),
                "activation_bytes_per_sample": 4096.0 * (i + 1),
                "batch_norm_channels": 64 if i % 3 == 0 else 0,
            }
        )
    return {
        "schema": "dpsim.workload/1",
        "name": "own workload",
        "local_batches": [8, 32],
        "layers": layers,
        "update_s": 3.1e-4,
        "overhead_s": 1.3e-4,
        "overhead_per_sample_s": 1.7e-6,
        "state_bytes": 4096,
    }


def own_machine() -> dict[str, Any]:
    """A machine with tables alone and beside computation, two links, slowdowns, a selection and two speeds."""
    allreduce, overlap = [], []
    algorithms = ("auto", "one-shot", "two-shot", "mpi", "ring", "direct")
    cases = itertools.product(enumerate(algorithms), (2, 4), (("float32", 1.0), ("bfloat16", 0.6)))
    for (number, algorithm), devices, (wire_dtype, share) in cases:
        sizes = [4, 4096, 65536, 1048576, 16777216]
        times = [(1 + 0.1 * number) * devices * share * (1e-5 + 3e-10 * size) for size in sizes]
        table = {"algorithm": algorithm, "devices": devices, "sizes_bytes": sizes, "wire_dtype": wire_dtype}
        allreduce.append(table | {"time_s": times, "slow_factor": 1.3})
        cost = {"time_s": [1.2 * t for t in times], "compute_loss_s": [0.3 * t for t in times], "poll_s": 2e-6}
        overlap += [table | cost | {"overlap": mechanism, "slow_factor": 1.2} for mechanism in ("poll", "thread")]
    speed = {"devices": 2, "reference_s": 1e-3, "slow_reference_s": 1.4e-3, "slow_share": 0.2, "compute_factor": 1.35}
    return {
        "schema": "dpsim.machine/1",
        "name": "own machine",
        "calibrated_on": "made up",
        "memory_bytes": 2e9,
        "cores": 4,
        "allreduce": allreduce,
        "overlap": overlap,
        "speed": [speed],
        "link": {"latency_s": 3e-5, "bandwidth_bytes_per_s": 1.25e9, "reduce_s_per_byte": 1e-10},
        "link_in_node": {"latency_s": 2e-6, "bandwidth_bytes_per_s": 8e9, "reduce_s_per_byte": 1e-10},
        "selection": [{"devices": 4, "algorithms": ["one-shot", "two-shot"], "below_bytes": [8192]}],
        "compute_slowdown": [{"devices": 2, "factor": 1.07, "half_width": 0.02}, {"devices": 4, "factor": 1.2}],
    }


def prepare(tree: Tree, published: Path) -> Tree:
    """Write the input files of the predictions into a tree's folder; the published ones come from ``published``."""
    tree.folder.mkdir()
    for name, content in (("workload", own_workload()), ("machine", own_machine())):
        (tree.folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    for name in ("googlenet_k80.toml", "k80_10gbe.toml"):
        shutil.copy(published / name, tree.folder / name)
    tree.check()
    return tree


def compare(base: str, checks: Sequence[str]) -> dict[str, Any]:
    """The results of the checks, by name. Prints a row of the table for each. Raises ``DpsimError``."""
    source = Path(str(importlib.resources.files("dpsim"))).resolve().parent
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dpsim-compare-") as name:
        place = Path(name).resolve()
        with checked_out(source, base, place / "base"):
            published = source / "experiments" / "machines"
            old = prepare(Tree(place / "base", place / "old", place / "old-cache"), published)
            new = prepare(Tree(source, place / "new", place / "new-cache"), published)
            print(f"{'check':<12} {'compared':>9} {'differences':>12} {'seconds':>8}", flush=True)
            for check in checks:
                begin_s = time.monotonic()
                if check == SPEED:
                    results[SPEED] = compare_speed(Trees(old, new), place / "speed-cache")
                    continue
                comparison = CHECKS[check](Trees(old, new))
                seconds = time.monotonic() - begin_s
                counts = f"{comparison.compared:>9} {len(comparison.differences):>12} {seconds:>8.0f}"
                print(f"{check:<12} {counts}", flush=True)
                results[check] = asdict(comparison) | {"seconds": seconds}
    return results


def _summarize(results: Mapping[str, Any]) -> int:
    """Print notes, the first differences and the speed; 1 where anything differs."""
    compared = {name: result for name, result in results.items() if name != SPEED}
    for check, result in compared.items():
        for note in result["notes"]:
            print(f"note on {check}: {note}")
        by_field: dict[str, list[dict[str, str]]] = {}
        for difference in result["differences"]:
            by_field.setdefault(difference["place"].rpartition(".")[2], []).append(difference)
        for name, same_field in list(by_field.items())[:_SHOWN]:
            first = same_field[0]
            print(f"{check}: {name} differs in {len(same_field)} places, first in {first['place']}")
            print(f"  old: {first['old']}\n  new: {first['new']}")
        if len(by_field) > _SHOWN:
            print(f"{check}: {len(by_field) - _SHOWN} more fields differ; --json FILE writes all differences")
    for name, ratio in results.get(SPEED, {}).items():
        interval = f"95 % interval {ratio['low']:.3f} to {ratio['high']:.3f}"
        print(f"step time of {name}, new over old: {ratio['ratio']:.3f} ({interval})")
    different = any(result["differences"] for result in compared.values())
    if compared:
        print("different" if different else "same")
    return int(different)


def main() -> int:
    """Print the comparison; 1 where the trees differ, 2 where they cannot be compared."""
    names = (*CHECKS, SPEED)
    parser = argparse.ArgumentParser(
        prog="python -m dpsim.experiments.compare_revisions",
        description="Compare the behaviour of this tree with that of an older revision, by their command lines.",
    )
    parser.add_argument("--base", required=True, help="the revision to compare with: a commit, a branch or a tag")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"a list of {', '.join(names)}")
    parser.add_argument("--speed", action="store_true", help="also compare the median step times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    arguments = parser.parse_args()
    checks = list(dict.fromkeys([*arguments.only.split(","), *([SPEED] if arguments.speed else [])]))
    if unknown := [check for check in checks if check not in names]:
        parser.error(f"unknown check {unknown[0]!r}; allowed: {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        results = compare(arguments.base, checks)
    except (DpsimError, subprocess.TimeoutExpired) as error:
        print(f"compare_revisions: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return _summarize(results)


if __name__ == "__main__":
    raise SystemExit(main())
