"""Plug-ins: fusion rules, algorithms and questions of installed packages, found by their entry points."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpsim.algorithms import ALGORITHMS, Algorithm
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.harness.sweep.questions import QUESTIONS, compared, completed
from dpsim.plan import Plan
from dpsim.records.sweep import read_experiment
from dpsim.registry import Registry

Dpsim = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]
RULE = """
import numpy as np
from dpsim.fusion_rules import FusionRule

def pairs(tensors, threshold_bytes):
    count = len(tensors.size_bytes)
    changes = np.flatnonzero(np.diff(tensors.dtype_code)) + 1
    return np.union1d(np.arange(0, count, 2), [*changes, count])

PAIRS = FusionRule(
    name="pairs", summary="two", default_threshold_bytes=None, needs_costs=False, while_running=False, buckets=pairs
)
OTHER = 3
"""
STAR = """
from dataclasses import replace
from dpsim.algorithms import ALGORITHMS

STAR = replace(ALGORITHMS["recursive-doubling"], name="star")
"""


QUESTION = """
from dataclasses import replace
from dpsim.harness.sweep.questions import QUESTIONS

QUESTION = replace(
    QUESTIONS["settings"],
    name="strategies",
    about="strategies",
    apart=lambda experiment: ("network", "fusion_threshold_bytes"),
)
"""


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install a package of one module with entry points of a group into a folder of the path."""

    def install(name: str, code: str, group: str, **points: str) -> Path:
        (tmp_path / f"{name}.py").write_text(code)
        (info := tmp_path / f"{name}-1.0.dist-info").mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{point} = {name}:{value}" for point, value in points.items()]
        with (info / "entry_points.txt").open("a") as entries:
            entries.write("\n".join([f"[{group}]", *lines, ""]))
        importlib.invalidate_caches()
        return tmp_path

    monkeypatch.syspath_prepend(str(tmp_path))
    return install


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ALGORITHMS, FUSION_RULES, QUESTIONS):
        monkeypatch.setattr(registry, "_items", dict(registry))
        monkeypatch.setattr(registry, "_plugged", set[str]())


def test_a_rule_and_an_algorithm_of_a_package_are_used_by_their_names(
    packaged: Callable[..., Path], dpsim: Dpsim
) -> None:
    packaged("two_of", RULE, "dpsim.fusion_rules", pairs="PAIRS")
    packaged("stars", STAR, "dpsim.algorithms", star="STAR")
    assert Plan(devices=2, global_batch=4, fusion_rule="pairs", algorithm="star").fusion_rule == "pairs"
    assert isinstance(ALGORITHMS["star"], Algorithm) and FUSION_RULES.find("pairs").summary == "two"
    machines = ROOT / "experiments" / "machines"
    files = ["--workload", machines / "googlenet_k80.toml", "--machine", machines / "k80_10gbe.toml"]
    code, out, err = dpsim("predict", *files, "--devices", "2", "--fusion-rule", "per-tensor,pairs")
    assert code == 0 and "pairs" in out, err


def test_a_question_of_a_package_is_asked_by_its_name(packaged: Callable[..., Path]) -> None:
    sys.modules.pop("asking", None)
    packaged("asking", QUESTION, "dpsim.questions", strategies="QUESTION")
    declared = read_experiment(ROOT / "experiments" / "sweeps" / "zero1.toml")
    experiment = completed(msgspec.structs.replace(declared, question="strategies"))
    assert "strategy" in compared(experiment) and QUESTIONS.find("strategies").about == "strategies"
    with pytest.raises(ConfigError, match="did you mean 'strategies'"):
        completed(msgspec.structs.replace(declared, question="strategie"))


def test_packages_are_searched_only_for_names_that_are_not_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **group: asked.append(group) or ())
    assert ALGORITHMS.find("ring").name == "ring" and not asked
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        ALGORITHMS.find("rings")
    assert asked == [{"group": "dpsim.algorithms"}]


def test_a_name_that_nobody_has_is_refused_with_the_names_of_plug_ins(packaged: Callable[..., Path]) -> None:
    packaged("two_of", RULE, "dpsim.fusion_rules", pairs="PAIRS")
    with pytest.raises(ConfigError, match="did you mean 'pairs'"):
        FUSION_RULES.find("pairz")


@pytest.mark.parametrize(
    ("code", "points", "text"),
    [
        ("import nowhere", {"pairs": "PAIRS"}, "'pairs' of the package broken cannot be imported: ModuleNotFoundError"),
        ("1 / 0", {"pairs": "PAIRS"}, "ZeroDivisionError"),
        (RULE, {"pairs": "NONE"}, "cannot be imported: AttributeError"),
        (RULE, {"pairs": "OTHER"}, "is a int"),
        (RULE, {"twos": "PAIRS"}, "'twos' of the package broken is the fusion rule 'pairs'"),
        (RULE, {"ddp": "PAIRS"}, "the package broken claims the fusion rule 'ddp', which dpsim has"),
    ],
)
def test_a_plug_in_that_is_broken_is_refused_with_its_package(
    code: str, points: dict[str, str], text: str, packaged: Callable[..., Path]
) -> None:
    sys.modules.pop("broken", None)
    packaged("broken", code, "dpsim.fusion_rules", **points)
    with pytest.raises(ConfigError, match=text) as refused:
        FUSION_RULES.find(next(name for name in (*points, "other") if name != "ddp"))
    assert refused.value.allowed and "pip uninstall broken" in refused.value.remedy


def test_two_packages_may_not_claim_one_name(packaged: Callable[..., Path]) -> None:
    for name in ("first", "second"):
        packaged(name, RULE, "dpsim.fusion_rules", pairs="PAIRS")
    with pytest.raises(ConfigError, match="claims the fusion rule 'pairs', which the package"):
        FUSION_RULES.find("pairs")


def test_a_registry_without_a_group_has_no_plug_ins() -> None:
    with pytest.raises(ConfigError, match="unknown thing 'x'"):
        Registry[Algorithm]("thing", Algorithm).find("x")
