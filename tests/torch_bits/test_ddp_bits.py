"""Whether two settings of DDP give the same bits: the prediction against what gloo's ranks train."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dpsim import codec
from dpsim.kernels.allreduce.expression import text
from dpsim.lowering.ddp import DdpOptions, DdpParameter
from dpsim.torch.ddp_bits import ReducedGradient, first_difference, gradient_expressions, step_buckets

MIB = 2**20
SCRIPT = Path(__file__).parents[1] / "support" / "ranks_gloo.py"
TIMEOUT_S = 600
RUNS: dict[str, list[dict[str, Any]]] = {
    "mlp": [{"bucket_cap_mb": cap} for cap in (0.3, 1, 2, 4, 25)],
    "resnet18": [{"bucket_cap_mb": cap} for cap in (0.5, 25, 100, 1000)],
    "vit": [{}, *({"bucket_cap_mb": cap, "static_graph": static} for cap in (25, 100) for static in (False, True))],
    "gpt": [{"bucket_cap_mb": cap, "find_unused_parameters": True} for cap in (0.5, 25, 100, 1000)],
    "unused": [{"bucket_cap_mb": cap, "find_unused_parameters": True} for cap in (1, 1.1, 1.3, 100)],
    "mixed": [{"bucket_cap_mb": cap} for cap in (0.4, 25, 100, 1000)],
}
"""The arguments of DDP that each model is trained with; any two of them are a pair."""
SAME_BITS = 20
"""Of the 44 pairs, at 3 ranks and more."""
SMALL_CAPS = (0, 0.004, 0.01, 0.03, 0.06, 0.1, 0.2, 1)


def gradients(*elements: int, **options: Any) -> list[ReducedGradient]:
    return [
        ReducedGradient(name=f"w{index}", elements=count, parameter=DdpParameter(size_bytes=4 * count, **options))
        for index, count in enumerate(elements)
    ]


def caps(first: float, second: float, **options: Any) -> tuple[DdpOptions, DdpOptions]:
    return DdpOptions(bucket_cap_bytes=first, **options), DdpOptions(bucket_cap_bytes=second, **options)


def test_the_initial_list_is_one_bucket_so_that_caps_matter_from_step_2_on() -> None:
    model = gradients(600, 300, 300)
    difference = first_difference(model, [2, 1, 0], 3, caps(1200, MIB))
    assert difference is not None and (difference.step, difference.name, difference.element) == (2, "w0", 0)
    assert list(map(text, difference.expressions)) == ["(2+1)+0", "(0+2)+1"]
    learnt_late = first_difference(model, [2, 1, 0], 3, caps(1200, MIB, static_graph=True))
    assert learnt_late is not None and learnt_late.step == 3
    kept = first_difference(model, [2, 1, 0], 3, caps(1200, MIB, find_unused_parameters=True))
    assert kept is not None and (kept.step, kept.name) == (1, "w0")


def test_other_caps_that_make_the_same_buckets_give_the_same_bits() -> None:
    model = gradients(3 * MIB, MIB, MIB)
    assert first_difference(model, [2, 1, 0], 3, caps(8 * MIB, 6 * MIB)) is None
    assert first_difference(model, [2, 1, 0], 3, caps(8 * MIB, 4 * MIB)) is not None
    assert first_difference(model, [2, 1, 0], 3, (DdpOptions(), DdpOptions(bucket_cap_bytes=25.0 * MIB))) is not None


def test_two_ranks_add_alike_whatever_the_buckets() -> None:
    assert first_difference(gradients(600, 300, 300), [2, 1, 0], 2, caps(0, MIB)) is None


def test_an_element_whose_chunk_is_the_same_is_added_alike() -> None:
    model = gradients(30, 30)
    alone, together = (gradient_expressions(model, step_buckets(model, [1, 0], each, 2), 3) for each in caps(120, MIB))
    assert [[end for end, _ in ranges] for ranges in alone] == [[10, 20, 30]] * 2
    assert [[end for end, _ in ranges] for ranges in together] == [[10, 30], [20, 30]]
    difference = first_difference(model, [1, 0], 3, caps(120, MIB))
    assert difference is not None and (difference.name, difference.element) == ("w0", 0)


def test_a_gradient_that_backward_does_not_reach_has_no_order() -> None:
    model, options = gradients(30, 30, 30), caps(120, MIB, find_unused_parameters=True)
    difference = first_difference(model, [2], 3, options)
    assert difference is not None and difference.name == "w2"


def test_sparse_gradients_are_gathered_and_not_added_by_gloo() -> None:
    model = gradients(30, 30, sparse=True)
    assert gradient_expressions(model, ((1,), (0,)), 3) == [[], []]


def trained(ranks: int, runs: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What ranks of gloo trained; every gradient has the bits that its order gives."""
    arguments = [sys.executable, str(SCRIPT), str(ranks), str(folder), json.dumps(runs)]
    subprocess.run(arguments, check=True, timeout=TIMEOUT_S)
    outcomes: list[dict[str, Any]] = json.loads((folder / "outcomes.json").read_text())
    assert not [(run, outcome["wrong"]) for run, outcome in zip(runs, outcomes, strict=True) if outcome["wrong"]]
    return outcomes


def seen_difference(first: dict[str, Any], second: dict[str, Any]) -> tuple[int, str] | None:
    """The first step, and the first gradient in the order of the parameters, whose bits differ."""
    for number, (one, other) in enumerate(zip(first["steps"], second["steps"], strict=True), 1):
        for name in one:
            if one[name] != other[name]:
                return number, name
    return None


def predicted_difference(first: dict[str, Any], second: dict[str, Any], ranks: int) -> tuple[int, str] | None:
    model = [codec.convert(each, ReducedGradient) for each in first["gradients"]]
    options = codec.convert(first["options"], DdpOptions), codec.convert(second["options"], DdpOptions)
    difference = first_difference(model, first["order"], ranks, options)
    return None if difference is None else (difference.step, difference.name)


def check_pairs(ranks: int, runs: Sequence[dict[str, Any]], folder: Path) -> int:
    """How many pairs of runs of a model have the same bits, after each was compared with its prediction."""
    outcomes = trained(ranks, runs, folder)
    same = 0
    for (run, first), (other, second) in itertools.combinations(zip(runs, outcomes, strict=True), 2):
        if run["architecture"] == other["architecture"]:
            seen = seen_difference(first, second)
            assert predicted_difference(first, second, ranks) == seen, (run, other)
            same += seen is None
    return same


def random_runs(networks: int, seed: int) -> list[dict[str, Any]]:
    """Four runs of each of so many random networks."""
    choose = random.Random(seed)
    kinds: list[dict[str, Any]] = [{}, {}, {"static_graph": True}, {"find_unused_parameters": True}]
    return [
        {"architecture": network, "options": {"bucket_cap_mb": choose.choice(SMALL_CAPS), **choose.choice(kinds)}}
        for network in range(networks)
        for _ in range(4)
    ]


@pytest.mark.torch
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("ranks", "networks"), [(2, 3), (3, 12), (4, 8)])
def test_random_networks_have_the_bits_that_are_predicted(ranks: int, networks: int, tmp_path: Path) -> None:
    same = check_pairs(ranks, random_runs(networks, ranks), tmp_path)
    assert same == 6 * networks if ranks == 2 else 0 < same < 6 * networks


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("ranks", [3, 4])
def test_architectures_have_the_bits_that_are_predicted(ranks: int, tmp_path: Path) -> None:
    runs = [
        {"architecture": architecture, "options": options, "check": architecture != "mixed"}
        for architecture, each in RUNS.items()
        for options in each
    ]
    assert check_pairs(ranks, runs, tmp_path) == SAME_BITS


@pytest.mark.torch
@pytest.mark.timeout(TIMEOUT_S)
def test_gradients_of_a_hook_in_16_bits_are_sums_in_the_predicted_order(tmp_path: Path) -> None:
    """The hook adds in 16 bits, and each sum is rounded to them."""
    trained(3, [{"architecture": "mlp", "options": {"bucket_cap_mb": 0.3}, "half": True}], tmp_path)
