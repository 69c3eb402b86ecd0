"""``dpsim predict --rank strategy``: its table and sentences, its JSON, and what it says to a mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from published_files import MACHINE, WORKLOAD

from dpsim import codec
from dpsim import workload as workloads

Dpsim = Callable[..., tuple[int, str, str]]
RANK = ("predict", "--rank", "strategy")
FILES = ("--workload", str(WORKLOAD), "--machine", str(MACHINE))


@pytest.fixture
def stated(tmp_path: Path) -> str:
    """The published workload with made-up activations and outputs of its layers."""
    published = workloads.read(WORKLOAD)
    sizes = {"activation_bytes_per_sample": 1e6, "output_bytes_per_sample": 1e5}
    layers = tuple(msgspec.structs.replace(layer, **sizes) for layer in published.layers)
    codec.write(tmp_path / "w.json", msgspec.structs.replace(published, layers=layers))
    return str(tmp_path / "w.json")


def _shown(dpsim: Dpsim, *arguments: str, rank: str = "strategy") -> dict[str, Any]:
    code, out, err = dpsim("predict", "--rank", rank, *arguments, "--json")
    assert code == 0, err
    shown: dict[str, Any] = json.loads(out)
    assert list(shown) == ["schema", "command", "environment", "points", "summary"]
    assert shown["command"] == "advise"
    return shown


def test_what_is_fastest_and_what_fits(dpsim: Dpsim, stated: str) -> None:
    files = ("--workload", stated, "--machine", str(MACHINE), "--devices", "8", "--algorithm", "ring")
    code, out, err = dpsim(*RANK, *files, "--global-batch", "256", "--memory", "16GiB")
    assert (code, err) == (0, "")
    assert "on 8 devices, global batch 256" in out and " of 16 GiB " in out and "fits" in out
    assert "The fastest of the plans that fit is" in out and "--strategy data-parallel" in out
    tight = _shown(dpsim, *files, "--global-batch", "256", "--memory", "200MiB")
    assert {point["fits"] for point in tight["points"]} <= {True, False}
    for point in tight["points"]:
        assert point["fits"] == (point["memory_bytes"]["total"] <= 200 * 2**20)


def test_json_has_the_best_of_each_strategy_or_all(dpsim: Dpsim, stated: str) -> None:
    files = ("--workload", stated, "--machine", str(MACHINE), "--devices", "2x2", "--algorithm", "ring")
    shown = _shown(dpsim, *files, "--set", "optimizer=adamw")
    strategies = [point["strategy"].partition(":")[0] for point in shown["points"]]
    assert sorted(strategies) == ["data-parallel", "pipeline", "zero1", "zero2", "zero3"]
    steps = [point["predicted_step_s"] for point in shown["points"]]
    assert steps[1:] == sorted(steps[1:]) and steps[0] <= 1.02 * min(steps)
    assert shown["summary"]["advised"] == shown["points"][0]["flags"]
    assert all(point["predicted_low_s"] < point["predicted_step_s"] for point in shown["points"])
    assert {(point["optimizer"], point["layout"], point["global_batch"]) for point in shown["points"]} == {
        ("adamw", "2x2", 256)
    }
    every = _shown(dpsim, *files, "--set", "optimizer=adamw", rank="plan")
    assert len(every["points"]) > len(shown["points"])
    assert every["summary"]["advised"] == shown["summary"]["advised"]
    assert {point["flags"] for point in shown["points"]} <= {point["flags"] for point in every["points"]}


def test_refusals_and_unknown_memory_are_told(dpsim: Dpsim) -> None:
    code, out, err = dpsim(*RANK, *FILES, "--devices", "4")
    assert (code, err) == (0, "")
    assert "zero1; zero2; zero3; and" in out and "there is no reduce-scatter" in out
    assert "output_bytes_per_sample" in out and "not known" in out
    code, out, err = dpsim(*RANK, *FILES, "--devices", "4", "--memory", "100MB")
    assert code == 0 and out.startswith("Nothing fits into the 100 MB that a device has.")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--devices 0", "devices"),
        ("--devices 2,4", "2,4"),
        ("--devices 8 --global-batch 4", "cannot feed 8 devices"),
        ("--devices 8 --memory 0", "--memory is '0'"),
        ("--devices 8 --memory much", "'much' is not understood"),
        ("--devices 8 --set optimizer=adam", "unknown optimizer 'adam'"),
        ("--devices 8 --algorithm rings", "unknown algorithm 'rings'"),
        ("--devices 8 --fusion-rule ddpp", "unknown fusion rule 'ddpp'"),
        ("--devices 8 --strategy zero1 --algorithm ring", "--strategy with --rank strategy"),
        ("--devices 8 --fusion-threshold 0", "--fusion-threshold with --rank strategy"),
        ("--devices 8 --global-batch 64,128", "--global-batch 64,128 with --rank strategy"),
        ("--devices 8 --find bucket", "--rank and --find"),
    ],
)
def test_a_mistake_gets_one_message(dpsim: Dpsim, flags: str, said: str) -> None:
    code, out, err = dpsim(*RANK, *FILES, *flags.split())
    assert (code, out) == (2, "")
    assert err.startswith("dpsim: ") and said in err and "Traceback" not in err
