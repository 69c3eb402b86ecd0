"""What a script takes with activation checkpointing, or without, where it was profiled the other way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from published_files import MACHINE
from script_profiles import four_layers

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.model.recomputation import recomputing
from dpsim.torch.script.probe.steps import StepMemory
from dpsim.torch.script.recomputed import divided_s, forward_of_blocks_s, other_activation_bytes
from dpsim.workload import Workload

Dpsim = Callable[..., tuple[int, str, str]]


def profiled(*, recomputes: bool = False) -> Workload:
    """Four layers, of which the first is no block."""
    workload = four_layers()
    layers = tuple(
        msgspec.structs.replace(
            layer,
            recompute_s=(5e-5 * (number > 0),),
            activation_bytes_per_sample=100.0,
            other_activation_bytes_per_sample=100.0 if number == 0 else 10.0,
        )
        for number, layer in enumerate(workload.layers)
    )
    assert workload.ddp is not None
    ddp = msgspec.structs.replace(workload.ddp, recomputes=recomputes)
    return msgspec.structs.replace(workload, layers=layers, ddp=ddp)


@pytest.mark.parametrize(("recomputes", "recompute", "backward_s"), [(False, "all", 2.5e-4), (True, "none", 1.5e-4)])
def test_backward_has_the_forward_of_blocks_once_more_or_once_less(
    recomputes: bool, recompute: str, backward_s: float
) -> None:
    workload = profiled(recomputes=recomputes)
    other = recomputing(workload, recompute)
    assert [layer.backward_s[0] for layer in other.layers] == pytest.approx([2e-4, *[backward_s] * 3])
    assert [layer.activation_bytes_per_sample for layer in other.layers] == [100.0, 10.0, 10.0, 10.0]
    assert other.ddp is not None and other.ddp.recomputes is not recomputes
    again = recomputing(other, "none" if recompute == "all" else "all")
    assert [layer.backward_s[0] for layer in again.layers] == pytest.approx([2e-4] * 4)


def test_what_the_script_does_is_as_it_was_profiled() -> None:
    assert recomputing(profiled(), "none") == profiled()
    assert recomputing(profiled(recomputes=True), "all") == profiled(recomputes=True)


def test_a_profile_without_blocks_and_an_unknown_word_are_refused() -> None:
    with pytest.raises(ConfigError, match="knows no blocks that could be computed again"):
        recomputing(four_layers(), "all")
    with pytest.raises(ConfigError, match="some"):
        recomputing(profiled(), "some")


def test_predict_assumes_it(dpsim: Dpsim, tmp_path: Path) -> None:
    codec.write(tmp_path / "w.json", profiled())
    command = ("predict", "--workload", tmp_path / "w.json", "--machine", MACHINE, "--devices", "1", "--json")
    steps = []
    for assumed in ((), ("--assume", "recompute=none"), ("--assume", "recompute=all")):
        code, out, err = dpsim(*command, *assumed)
        assert code == 0, err
        steps.append(json.loads(out)["points"][0]["predicted_step_s"])
    assert steps[0] == steps[1] and steps[2] - steps[0] == pytest.approx(3 * 5e-5)
    assert dpsim(*command, "--assume", "recompute=some")[0] == 2


def weighed(head_bytes: int = 80) -> StepMemory:
    """A step that takes 20 bytes beside what autograd saves."""
    saved = {
        "embedding": 100,
        "blocks.0.a": 40,
        "blocks.0.b": 60,
        "blocks.1.a": 50,
        "blocks.10": 50,
        "head": head_bytes,
    }
    return StepMemory(
        activation_bytes=sum(saved.values()) + 20,
        update_bytes=0,
        saved_bytes=saved,
        copied_bytes={},
        gradients="kept",
        entered_bytes=dict.fromkeys(("blocks.0", "blocks.1", "blocks.10"), 8),
    )


@pytest.mark.parametrize(("head_bytes", "largest_bytes"), [(80, 100 + 3 * 8 + 80 + 20), (10, 100 + 40 + 60)])
def test_with_all_blocks_recomputed_the_largest_sum_is_that_at_the_end_or_in_a_block(
    head_bytes: int, largest_bytes: int
) -> None:
    others = other_activation_bytes(weighed(head_bytes))
    assert sum(others.values()) == pytest.approx(largest_bytes)
    assert (others["blocks.0.a"], others["blocks.1.a"], others["head"]) == (8, 8, head_bytes)


def test_seconds_of_a_block_are_those_of_its_modules_alone() -> None:
    forward_s = {"embedding": 1.0, "blocks.0.a": 2.0, "blocks.0.b": 3.0, "head": 4.0}
    assert forward_of_blocks_s(weighed(), forward_s) == {"blocks.0.a": 2.0, "blocks.0.b": 3.0}


@pytest.mark.parametrize(
    ("recomputes", "seconds"), [((False, True, True), (0.0, 1.0, 2.0)), ((False,) * 3, (1.0,) * 3)]
)
def test_what_backward_recomputes_is_divided_among_the_layers_that_do(
    recomputes: tuple[bool, ...], seconds: tuple[float, ...]
) -> None:
    backward_s = (3.0, 3.0, 6.0) if any(recomputes) else (3.0, 3.0, 3.0)
    assert divided_s(3.0, backward_s, recomputes) == pytest.approx(seconds)
    assert divided_s(100.0, backward_s, (True,) * 3) == pytest.approx(backward_s), "no more than all of it"
