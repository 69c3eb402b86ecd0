"""What a script may contain: every cell of the table in docs/pytorch.md, held by scripts for each of its rows."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpsim.errors import ConfigError
from dpsim.experiments.bug_or_rounding import Case, sharded_parts
from dpsim.harness.explain import script as explain
from dpsim.harness.reproduce.script import ScriptComparison, compare
from dpsim.harness.script.experiment import script_experiment
from dpsim.harness.script.measure import ScriptStudy
from dpsim.launch.job_python import OWN
from dpsim.launch.scratch import scratch
from dpsim.model.points import predict_points
from dpsim.model.two_steps import ANY_LINK
from dpsim.setting import Grid
from dpsim.study.runners.job_ranks import JobRanks
from dpsim.study.runners.script_processes import started
from dpsim.torch.script.probe.in_turns.visit import Turn
from dpsim.torch.script.profile_script import profile_script
from dpsim.torch.script.request import Part, ScriptRequest
from dpsim.workload import Workload

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
COLUMNS = ("predict", "sweep", "explain", "reproduce")
KINDS = ("answered", "approximated", "named", "refused")
APPROXIMATED = re.compile(r"priced as|are priced here|which rule ddp does not")
"""What a line says of a feature that something else is predicted for; of one that is left out it does not."""
DATA = "data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 5, (4096,)))"
SCRIPTS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("contents.toml").read_text("utf-8"))["script"]


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Return the cells of each row by their columns."""
    page = PAGE.read_text(encoding="utf-8").split("## What a script may contain")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return {name: dict(zip(COLUMNS, cells, strict=True)) for name, *cells in rows[2:]}


def text_of(script: dict[str, Any]) -> str:
    others = ("row", "fsdp", "devices", "says", *COLUMNS)
    parts = {"data": DATA} | {name: text for name, text in script.items() if name not in others}
    whole = Case("", sharded_parts(parts) if script.get("fsdp") else parts).script
    return whole.replace("range(4)", "range(1000)")


class Asked:
    """A script, and what each command answers of it: lines beside its numbers. Raises ``ConfigError``."""

    def __init__(self, script: dict[str, Any], folder: Path) -> None:
        self.path, self.folder, self.devices = folder / "train.py", folder, script.get("devices", 2)
        self.path.write_text(text_of(script), encoding="utf-8")
        self._workload: Workload | None = None

    def workload(self) -> Workload:
        """Return its profile, which is made once."""
        if self._workload is None:
            self._workload = profile_script(
                ScriptRequest(script=str(self.path), devices=self.devices, steps=6, must_end=True)
            )
        return self._workload

    def predict(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        points, summary = predict_points(self.workload(), ANY_LINK, Grid.of(devices=self.devices))
        assert points[0]["predicted_step_s"] > 0
        return list(summary["cautions"])

    def sweep(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Let the ranks of a setting train two turns, in place of the whole measurement."""
        workload, said = self.workload(), list[str]()
        declared = script_experiment(str(self.path), devices=(self.devices,), communication=("gloo",))
        monkeypatch.setattr(ScriptStudy, "_on_ranks", lambda _, task, __: task.inputs)
        ScriptStudy(experiment=declared, seen=workload)._first_rounds(said.append)
        assert workload.ddp is not None
        part = Part(
            kind="train",
            number=0,
            ranks=self.devices,
            script=str(self.path),
            fully_shard=bool(workload.ddp.units),
        )
        with scratch("ddp") as meeting, JobRanks.started([part], meeting, OWN) as job:
            (processes,) = started([part], job)
            visits = [visit for _ in range(2) for visit in processes.turn(Turn(2))]
            processes.end()
        assert all(len(visit.moments_s) == 3 for visit in visits)
        assert {visit.bucket_bytes for visit in visits} == {workload.ddp.bucket_bytes}
        return said

    def explain(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        of = explain.ScriptToExplain(script=str(self.path), devices=self.devices, steps=20)
        monkeypatch.setattr(explain, "profile_script", lambda *_, **__: self.workload())
        explained = explain.explain_script(of, lambda _: None)
        assert sum(part.seconds for part in explained.parts) > 0
        return list(explained.notes)

    def reproduce(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        of = ScriptComparison(script=str(self.path), devices=(1, self.devices), steps=2)
        verdict = compare(of, lambda _: None)
        return [verdict.sentence, *verdict.designs]


def test_every_row_of_the_table_has_a_script_and_every_cell_one_of_four_words() -> None:
    rows = table()
    assert {*rows} == {each["row"] for each in SCRIPTS}
    assert {cell for cells in rows.values() for cell in cells.values()} <= {*KINDS}


def cells() -> Iterator[Any]:
    """Yield each script with each column."""
    for number, script in enumerate(SCRIPTS):
        for column in COLUMNS:
            yield pytest.param(number, column, id=f"{number} {script['row']} {column}")


@pytest.fixture(scope="module")
def profiles() -> dict[int, Asked]:
    """Return the scripts that have been asked, which are profiled once."""
    return {}


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "column"), [*cells()])
def test_a_cell_is_true(
    number: int,
    column: str,
    profiles: dict[int, Asked],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = SCRIPTS[number]
    if number not in profiles:
        profiles[number] = Asked(of, tmp_path_factory.mktemp("script"))
    asked = profiles[number]
    kind, says = table()[of["row"]][column], of.get(column, {}).get("says", of.get("says", ""))
    ask: Callable[[pytest.MonkeyPatch], list[str]] = getattr(asked, column)
    try:
        lines = ask(monkeypatch)
    except ConfigError as error:
        assert kind == "refused", error
        assert says and says in f"{error}", error
        return
    ddp = asked.workload().ddp
    unpriced = () if ddp is None else ddp.unpriced()
    about = [line for line in lines if (says and says in line) or line.removeprefix("Note: ") in unpriced]
    got = "answered" if not about else "approximated" if APPROXIMATED.search(about[0]) else "named"
    assert got == kind, lines
