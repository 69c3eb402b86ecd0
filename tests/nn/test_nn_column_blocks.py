"""Column blocks: the same function as whole layers, block by block, whoever computes which block."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.tree import PartialSums, fold, slots
from dpsim.nn import build_model
from dpsim.nn.column_blocks import LEAST_COLUMNS, BlockSum
from dpsim.nn.network import Network, NoEvents
from dpsim.replica import Array, Batch, stage_ends
from dpsim.strategy import own_blocks

SHAPE, CLASSES, SAMPLES = (8, 8, 2), 5, 12
TOKENS = ("mlp:64,48,64,64", "mlp:64,64,dropout=0.3", "cnn:32,64,32,dropout=0.2", "resnet20")


def network(token: str, blocks: int, *, leaves: bool = False) -> tuple[Network, dict[str, Array]]:
    """A network that is bound to its initial parameters, and its gradients."""
    built = build_model(f"{token}{',' if ':' in token else ':'}column_blocks={blocks}", SHAPE, CLASSES)
    return built, bound(built, leaves=leaves)


def bound(built: Network, *, leaves: bool = False) -> dict[str, Array]:
    parameters = built.initial_parameters(3)
    gradients = {name: np.full_like(value, np.nan) for name, value in parameters.items()}
    built.bind(parameters, gradients)
    built.train_in_leaves(leaves, None)
    if leaves:
        built.normalise_batches(
            "leaf", lambda arrays: fold(slots(range(len(arrays) + 1)).tree, arrays.__getitem__, np.add)
        )
    return gradients


def batch(leaves: tuple[int, ...] = (0, SAMPLES)) -> Batch:
    random = np.random.default_rng(7)
    x = random.normal(size=(SAMPLES, *SHAPE)).astype(np.float32)
    return Batch(x=x, labels=np.arange(SAMPLES) % CLASSES, leaves=leaves, seed=5, step=2, first_sample=30)


def assembled(values: dict[str, Array], whole: dict[str, Array]) -> dict[str, Array]:
    """Tensors of whole layers from those of their blocks: the blocks of columns, or of rows, side by side."""
    result = {}
    for name, expected in whole.items():
        layer, _, role = name.rpartition(".")
        blocks = [values[each] for each in values if each.startswith(f"{layer}.block") and each.endswith(f".{role}")]
        if name in values:
            result[name] = values[name]
            continue
        axis = next(axis for axis in (-1, -2) if sum(each.shape[axis] for each in blocks) == expected.shape[axis])
        if all(each.shape[-1] == expected.shape[-1] for each in blocks):
            axis = -2
        result[name] = np.concatenate(blocks, axis)
    return result


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("blocks", [2, 3])
def test_blocks_compute_what_whole_layers_do(token: str, blocks: int) -> None:
    whole, whole_gradients = network(token, 1)
    cut, cut_gradients = network(token, blocks)
    if not any(isinstance(layer, BlockSum) for layer in cut.chain):
        pytest.skip(f"{token} has no layers that are wide enough for {blocks} blocks")
    expected, got = (each.forward_backward(batch(), NoEvents()).fetch() for each in (whole, cut))
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    for name, value in assembled(cut.initial_parameters(3), whole.initial_parameters(3)).items():
        assert np.array_equal(value, whole.initial_parameters(3)[name]), name
    for name, value in assembled(cut_gradients, whole_gradients).items():
        scale = np.abs(whole_gradients[name]).max()
        assert np.allclose(value, whole_gradients[name], rtol=0, atol=2e-4 * scale), name
    evaluated = [each.evaluate(batch().x, batch().labels) for each in (whole, cut)]
    assert evaluated[1].loss == pytest.approx(evaluated[0].loss, rel=1e-5)


def test_one_block_is_the_network_as_it_was() -> None:
    for token in TOKENS:
        plain, one = build_model(token, SHAPE, CLASSES), network(token, 1)[0]
        assert [layer.spec for layer in one.chain] == [layer.spec for layer in plain.chain]


def test_narrow_layers_the_first_input_and_the_last_layer_stay_whole() -> None:
    narrow = 2 * LEAST_COLUMNS - 1
    chain = build_model(f"mlp:{narrow},64,64,64,column_blocks=2", SHAPE, CLASSES).chain
    cut = {layer.name for layer in chain if layer.column_block >= 0}
    assert not any(name.startswith(("dense1.", "dense5.")) for name in cut)
    assert {name for name in cut if name.startswith("dense")} == {
        *(
            "dense2.block0.start",
            "dense2.block1.start",
            "dense2.block0",
            "dense2.block1",
            "dense3.block0",
            "dense3.block1",
        )
    }
    assert not any(layer.column_block >= 0 for layer in build_model("mlp:64,column_blocks=2", SHAPE, CLASSES).chain)


def test_the_mask_of_a_block_is_its_part_of_the_whole_layer() -> None:
    seen: dict[str, Array] = {}
    for blocks in (1, 2):
        built, _ = network("mlp:64,64,dropout=0.5", blocks)
        built.observe(lambda what, name, x, y: seen.update({name: y != 0}) if what == "forward" else None)
        built.forward_backward(batch(), NoEvents())
    kept = np.concatenate([seen["dropout1.block0"], seen["dropout1.block1"]], axis=-1)
    agree = kept == seen["dropout1"]
    assert agree.mean() > 0.99, "an element that the rectifier stopped is 0 either way"


class Ranks:
    """An ordered sum among threads that stand for ranks."""

    def __init__(self, sums: PartialSums) -> None:
        self._sums, self._barrier = sums, threading.Barrier(sums.ranks)
        self._held: dict[int, Array] = {}

    def of(self, rank: int) -> Any:
        def add(arrays: Sequence[Array]) -> Array:
            self._held.update(zip(self._sums.of(rank), [array.copy() for array in arrays], strict=True))
            self._barrier.wait(20)
            total: Array = fold(self._sums.tree, self._held.__getitem__, np.add)
            self._barrier.wait(20)
            return total

        return add


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(TOKENS), st.integers(2, 4), st.integers(2, 4), st.booleans())
def test_parts_have_the_bits_of_one_device(token: str, blocks: int, parts: int, in_leaves: bool) -> None:
    leaves = (0, 4, 8, SAMPLES) if in_leaves else (0, SAMPLES)
    alone, gradients = network(token, blocks, leaves=in_leaves)
    if parts > blocks or not any(layer.column_block >= 0 for layer in alone.chain):
        return
    expected = alone.forward_backward(batch(leaves), NoEvents()).fetch()
    ranks = Ranks(slots([own_blocks(blocks, part, parts).start for part in range(parts)] + [blocks]))
    outcomes: list[Any] = [None] * parts

    def run(part: int) -> None:
        own, _ = network(token, blocks)
        held = own_blocks(blocks, part, parts)
        numbers = [n for n, layer in enumerate(own.chain) if layer.column_block < 0 or layer.column_block in held]
        assert stage_ends(own.layers, numbers) == (0, len(own.chain))
        own.take_layers(numbers, add=ranks.of(part))
        of_part = bound(own, leaves=in_leaves)
        sums = own.forward_backward(batch(leaves), NoEvents()).fetch()
        outcomes[part] = sums, of_part, own.evaluate(batch().x, batch().labels)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    evaluated = alone.evaluate(batch().x, batch().labels)
    covered = set()
    for sums, of_part, of_evaluation in outcomes:
        assert sums == expected and of_evaluation == evaluated
        for name, value in of_part.items():
            if not np.isnan(value).any():
                covered.add(name)
                assert value.tobytes() == gradients[name].tobytes(), name
    assert covered == {*gradients}


@pytest.mark.parametrize("value", ["0", "-1", "65", "x", "1.5"])
def test_numbers_of_blocks_that_cannot_be_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="column_blocks"):
        build_model(f"mlp:64,64,column_blocks={value}", SHAPE, CLASSES)
