"""How the files of the package may depend on each other: no circles, and no room looks upward.

Every import counts: also those inside functions, and those for type checkers alone.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import dpsim
from dpsim.experiments.reports_page import committed

ROOT = Path(__file__).parents[1]

PROBE = (ROOT / "dpsim" / "torch" / "script" / "probe").resolve()
"""What runs in a watched job, whose files import each other relatively."""

LEVELS = (
    {"kernels"},
    {"comm", "launch", "nn", "data", "lowering"},
    {"runtime", "model", "report", "explore", "torch"},
    {"study"},
    {"harness", "imports", "lab", "validation"},
    {"cli", "experiments", "testing"},
)
"""The rooms from the bottom up. A room may import those below it and those beside it."""

COMMON = {"records"}
"""Rooms that everyone may import, as the modules at the top level of dpsim; they import no other room."""

ADMINISTRATION = {"study", "harness", "records", "imports", "report", "cli", "experiments", "lab"}
MOST_ADMINISTRATION = 0.88

ONE_PLACE: Mapping[str, tuple[str, set[str]]] = {
    "samples_of_step": ("the plan of a row of a grid", {"dpsim.setting", "dpsim.imports.steps"}),
    "alone_of": ("the predicted rows of a grid", {"dpsim.model.points", "dpsim.model.ranking"}),
    "PredictedRow": (
        "a predicted row",
        {"dpsim.model.points", "dpsim.model.ranking", "dpsim.model.remedies", "dpsim.harness.sweep.experiment"},
    ),
    "ratio_interval": ("the gain of a predicted row over another", {"dpsim.model.rows"}),
    "equally_fast": ("predicted rows that cannot be told apart", {"dpsim.model.rows"}),
    "candidates": ("the strategies to try, and the kernels", {"dpsim.model.ranking", "dpsim.nn.implementations"}),
    "caps_up_to_all": ("the thresholds to try", {"dpsim.model.thresholds", "dpsim.harness.sweep.grids"}),
    "known_mechanisms": ("the overlaps to try", {"dpsim.model.ranking", "dpsim.model.compare"}),
    "nnls": ("the link that times imply", {"dpsim.model.link_fit"}),
    "brentq": ("a number that a time implies", {"dpsim.model.link_fit", "dpsim.model.slowest"}),
    "least_squares": ("the numbers that steps imply", {"dpsim.model.estimate", "dpsim.validation.inputs"}),
}
"""What is called in one place alone: its name, what is made by it, and the modules that call it.

A module that calls one of them beside these has a second grid, row, ranking or fit of its own.
"""

MOST_RECORD_BYTES = 4_995_000
"""Of all committed records together; the design wants 5 MB at most."""

ENTRANCES = {"dpsim", "dpsim.__main__", "dpsim.api", "dpsim.entry", "dpsim.lab.__main__", "dpsim.validation.__main__"}
"""Modules that stand above all rooms: nobody imports them."""


@functools.cache
def files() -> Mapping[str, Path]:
    """The file of every module, by its name."""
    by_name = {}
    for folder, package in (("dpsim", "dpsim"), ("kernels", "dpsim.kernels"), ("experiments", "dpsim.experiments")):
        for path in (ROOT / folder).resolve().rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "dpsim" and parts[0] in ("kernels", "experiments"):
                continue  # links to the other two folders
            by_name[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return by_name


@functools.cache
def imports() -> Mapping[str, frozenset[str]]:
    """The modules of the package that each of its modules imports."""
    return {name: frozenset(_imported(path) & files().keys() - {name}) for name, path in files().items()}


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            beside = path.parent == PROBE  # a package of another name in the job's process
            assert node.module is not None and node.level == beside * (node.level == 1), (
                f"{path}:{node.lineno}: a relative import"
            )
            module = f"dpsim.torch.script.probe.{node.module}" if node.level else node.module
            for submodule in (f"{module}.{alias.name}" for alias in node.names):
                names.add(submodule if submodule in files() else module)
    return names


def circles(graph: Mapping[str, frozenset[str]]) -> set[frozenset[str]]:
    """The largest sets of two modules or more of which each imports each other one, directly or through others."""
    reachable = {name: _reachable(name, graph) for name in graph}
    sets = {frozenset(other for other in reachable[name] if name in reachable[other]) for name in graph}
    return {modules for modules in sets if len(modules) > 1}


def _reachable(start: str, graph: Mapping[str, frozenset[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def level(module: str) -> int:
    """The level of a module's room; -1 for what everyone may import."""
    if module in ENTRANCES:
        return len(LEVELS)
    room = module.split(".")[1]
    if room in COMMON or (f"dpsim.{room}" in files() and files()[f"dpsim.{room}"].name != "__init__.py"):
        return -1
    return next(number for number, rooms in enumerate(LEVELS) if room in rooms)


def test_a_circle_is_recognised() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set[str]()}
    assert circles({name: frozenset(others) for name, others in graph.items()}) == {frozenset("abc")}


def test_no_two_files_import_each_other() -> None:
    assert not circles(imports()), "modules that import each other, lazily or for their types alone too"


def test_no_room_looks_upward() -> None:
    upward = {(name, other) for name, others in imports().items() for other in others if level(other) > level(name)}
    assert not upward, "imports from a higher room"


BESIDE_PROBE = {
    "dpsim",
    "dpsim.comm",
    "dpsim.comm.clock",
    "dpsim.errors",
    "dpsim.installation",
    "dpsim.launch",
    "dpsim.launch.protected_process",
    "dpsim.launch.user_program",
    "dpsim.torch",
    "dpsim.torch.script",
}
"""What the probe loads of dpsim beside itself, packages above included."""
OF_CALLBACKS = {"lightning_callback": {"lightning", "pytorch_lightning"}, "hugging_face_callback": {"transformers"}}
"""The framework of each callback, which the job has that imports it."""


def test_the_probe_loads_the_standard_library_and_torch_alone_and_is_written_for_python_3_9() -> None:
    """A job's environment need not have anything else; its Python may be older than dpsim's."""
    probe = {name for name in files() if name.startswith("dpsim.torch.script.probe")}
    loaded = probe | {other for name in probe for other in imports()[name]}
    assert loaded - probe <= BESIDE_PROBE
    for name in probe | BESIDE_PROBE | {"dpsim.testing"}:
        tree = ast.parse(files()[name].read_text(encoding="utf-8"), feature_version=(3, 9))
        assert _foreign(tree) <= {"torch", *OF_CALLBACKS.get(name.rpartition(".")[2], ())}, name
        later = {"strict", "kw_only", "slots"} & {word.arg for word in ast.walk(tree) if isinstance(word, ast.keyword)}
        assert not later, f"{name}: {later} came with Python 3.10"


def _foreign(tree: ast.AST) -> set[str]:
    """The packages beside dpsim and the standard library that a module imports."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names} - {"dpsim"} - set(sys.stdlib_module_names)


def test_every_room_has_a_level() -> None:
    for name in files():
        level(name)


@pytest.mark.parametrize("name", ONE_PLACE)
def test_what_has_one_place_is_done_nowhere_else(name: str) -> None:
    what, places = ONE_PLACE[name]
    assert _callers()[name] == places, what


@functools.cache
def _callers() -> Mapping[str, set[str]]:
    """The modules that call each function or method, by the last part of its name."""
    callers: dict[str, set[str]] = {}
    for module, path in files().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                callers.setdefault(called, set()).add(module)
    return callers


def test_processes_are_started_in_the_room_that_ends_them() -> None:
    """A pool or a process of ``multiprocessing`` outlives a command that is killed, unless somebody sees to it."""
    starts = {"Process", "Pool", "ProcessPoolExecutor", "get_context"}
    names = {
        name
        for name, path in files().items()
        if level(name) < len(LEVELS) - 1 or name.startswith("dpsim.cli")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in starts and ast.unparse(node.value) == "multiprocessing")
        or (isinstance(node, ast.alias) and node.name in starts)
    }
    assert names == {"dpsim.launch.workers"}


def test_type_checkers_and_users_see_the_same_names_of_dpsim() -> None:
    tree = ast.parse((ROOT / "dpsim" / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    homes: dict[str, str | None] = {}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        homes |= {alias.asname or alias.name: node.module for alias in node.names}
    assert homes == dpsim._HOME and sorted(homes) == dpsim.__all__


@pytest.mark.parametrize("name", dpsim.__all__)
def test_every_name_of_dpsim_is_there(name: str) -> None:
    assert getattr(dpsim, name) is not None and name in dir(dpsim)
    assert dpsim._HOME[name] in files()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout knows what is committed")
def test_committed_records_stay_small() -> None:
    """The limit only ever falls, as that of what administers does. Reports of one's own do not count."""
    assert sum(path.stat().st_size for path in committed(ROOT / "reports", ".json")) <= MOST_RECORD_BYTES


def test_what_administers_stays_smaller_than_the_science_it_serves() -> None:
    """Lines of studies, records, reports, imports, commands and experiments, over those of all other modules.

    The limit only ever falls: what it allows is what stands, and the design wants 0.65.
    """
    lines = {True: 0, False: 0}
    for name, path in files().items():
        lines[name.partition(".")[2].partition(".")[0] in ADMINISTRATION] += len(
            path.read_text(encoding="utf-8").splitlines()
        )
    assert lines[True] <= MOST_ADMINISTRATION * lines[False], lines
