"""Model tokens: what they build, what is known of the layers beforehand, and what is said about a wrong one."""

from __future__ import annotations

import pytest

from dpsim.errors import ConfigError
from dpsim.nn import build_model
from dpsim.nn.sample_norm import GroupNorm


def described(token: str, shape: tuple[int, int, int]) -> list[str]:
    network = build_model(token, shape, 10)
    return [f"{layer.kind} {'x'.join(map(str, layer.output_shape))}" for layer in network.chain]


def test_widths_of_an_mlp_come_from_the_token() -> None:
    assert described("mlp:7,5", (2, 3, 1)) == ["flatten 6", "dense 7", "relu 7", "dense 5", "relu 5", "dense 10"]
    assert described("mlp:4x3", (2, 3, 1)) == described("mlp:4,4,4", (2, 3, 1))
    assert described("mlp", (8, 8, 1)) == described("mlp:256,256", (8, 8, 1))


def test_a_cnn_pools_where_it_widens_and_pools_large_pictures_more() -> None:
    def pictures(token: str, side: int) -> list[str]:
        kept = [text.split()[1] for text in described(token, (side, side, 3)) if text.startswith(("conv", "max"))]
        return [text for text in kept if "x" in text]

    assert pictures("cnn:4,4,8", 8) == ["8x8x4", "8x8x4", "4x4x4", "4x4x8"]
    assert pictures("cnn:4,8,16", 6) == ["6x6x4", "3x3x4", "3x3x8", "3x3x16"]
    assert pictures("cnn:4,4,4", 32) == ["32x32x4", "16x16x4", "16x16x4", "8x8x4", "8x8x4"]


def test_norm_and_dropout_come_from_the_token() -> None:
    assert described("mlp:6,norm=layer,dropout=0.2", (2, 3, 1)) == [
        "flatten 6",
        "dense 6",
        "layer-norm 6",
        "relu 6",
        "dropout 6",
        "dense 10",
    ]
    kinds = {norm: described(f"cnn:4,norm={norm}", (4, 4, 1))[1].split()[0] for norm in ("batch", "layer", "group")}
    assert kinds == {"batch": "batch-norm", "layer": "layer-norm", "group": "group-norm"}
    assert described("cnn:norm=none,dropout=0.5", (8, 8, 1))[:2] == ["conv 8x8x32", "relu 8x8x32"]
    assert described("cnn:norm=none,dropout=0.5", (8, 8, 1))[-2:] == ["dropout 64", "dense 10"]
    assert described("cnn:4,dropout=0", (4, 4, 1)) == described("cnn:4", (4, 4, 1))
    assert not any(text.startswith("batch") for text in described("resnet20:norm=instance", (8, 8, 1)))
    assert described("resnet20:dropout=0.1", (8, 8, 1))[-2:] == ["dropout 64", "dense 10"]


def test_a_group_norm_has_8_groups_or_as_many_as_leave_two_channels_each() -> None:
    layers = build_model("mlp:64,16,12,8,6,5,2,norm=group", (2, 2, 1), 3).chain
    normed = [layer for layer in layers if isinstance(layer, GroupNorm)]
    assert [layer.groups for layer in normed] == [8, 8, 2, 4, 1, 1, 1]


def test_the_default_cnn_has_enough_tensors_to_fuse() -> None:
    layers = build_model("cnn", (8, 8, 1), 10).layers
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    assert 20 <= len(tensors) <= 30
    assert 100_000 <= sum(tensor.elements for tensor in tensors) <= 200_000
    assert len({tensor.name for tensor in tensors}) == len(tensors)


def test_layers_know_their_tensors_activations_and_channels() -> None:
    specs = {layer.name: layer for layer in build_model("cnn:4", (8, 8, 2), 10).layers}
    assert [(t.name, t.shape, t.dtype) for t in specs["bn1"].tensors] == [
        ("bn1.gamma", (4,), "float32"),
        ("bn1.beta", (4,), "float32"),
    ]
    assert specs["conv1"].tensors[0].shape == (3, 3, 2, 4)
    assert specs["conv1"].activation_bytes_per_sample == 8 * 8 * 2 * 4
    assert specs["bn1"].activation_bytes_per_sample == 8 * 8 * 4 * 4 and specs["bn1"].batch_norm_channels == 4
    assert specs["relu1"].activation_bytes_per_sample == 8 * 8 * 4
    assert specs["dense1"].activation_bytes_per_sample == 4 * 4 and specs["dense1"].batch_norm_channels == 0


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("cn", "did you mean 'cnn'"),
        ("transformer", "write mlp, mlp:512,256,128"),
        ("resnet50", "did you mean 'resnet56'"),
        ("resnet20:16,32", "resnet20, then settings"),
        ("cnn:8,nrm=group", "did you mean 'norm'"),
        ("cnn:8,norm=groups", "did you mean 'group'"),
        ("cnn:norm=layer,norm=layer", "norm once"),
        ("mlp:8,dropout=half", "like dropout=0.1"),
        ("mlp:8,dropout=1", "less than 1"),
        ("mlp:8,dropout=nan", "less than 1"),
        ("cnn:crop=2.5", "like crop=4"),
        ("cnn:crop=-1", "crop is -1"),
        ("cnn:crop=8", "crop=7 at most"),
        ("cnn:flip=1.5", "flip is 1.5"),
        ("mlp:8,norm=instance", "two elements or more"),
        ("mlp:8,", "width x depth"),
        ("mlp:", "width x depth"),
        ("mlp:0,3", "widths of 1 or more"),
        ("mlp:64x0", "widths of 1 or more"),
        ("cnn:8x3", "cnn:16,32,64"),
        ("cnn:8,-3", "cnn:16,32,64"),
    ],
)
def test_a_wrong_token_is_answered_with_what_is_allowed(token: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        build_model(token, (8, 8, 1), 10)
    assert caught.value.allowed


@pytest.mark.parametrize(("shape", "classes"), [((8, 8), 10), ((8, 0, 1), 10), ((8, 8, 1), 1)])
def test_samples_that_are_no_pictures_are_refused(shape: tuple[int, ...], classes: int) -> None:
    with pytest.raises(ConfigError, match="height, width, channels"):
        build_model("mlp", shape, classes)
