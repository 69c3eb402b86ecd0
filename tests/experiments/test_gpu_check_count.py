"""The calls and bytes of a step on a device, counted without one."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
from dpsim.experiments.gpu_check import count

SHAPE = (32, 32, 3)


def totals(tally: count.Tally) -> tuple[int, int]:
    """Calls and bytes."""
    return tally.calls.total(), tally.read_bytes.total() + tally.written_bytes.total()


def test_the_kernels_of_layers_take_less_than_half_the_calls_and_bytes_of_a_resnet() -> None:
    ours, library = (totals(count.counted_step("resnet20", SHAPE, 16, kernels)) for kernels in (True, False))
    assert all(2 * mine < theirs for mine, theirs in zip(ours, library, strict=True))


def test_a_convolution_reads_its_operands_once() -> None:
    tally = count.counted_step("cnn:16,norm=none", SHAPE, 4, True)
    forward = ("conv1", "forward", "kernel convolution")
    pixels = 4 * 32 * 32
    assert tally.calls[forward] == 1
    assert tally.read_bytes[forward] == 4 * (3 * pixels + 9 * 3 * 16)
    assert tally.written_bytes[forward] == 4 * 16 * pixels


def test_calls_do_not_depend_on_the_batch_and_bytes_grow_with_it() -> None:
    (calls, small), (same, large) = (totals(count.counted_step("cnn:4", SHAPE, batch, False)) for batch in (2, 4))
    assert calls == same and small < large < 2 * small


@pytest.mark.parametrize("by", ["layer", "operation"])
def test_the_table_ends_with_the_sums_of_its_columns(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert count.main(["--model", "cnn:4", "--batch", "2", "--by", by]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == [by, "calls", "read", "written"]
    assert {"layer": "conv1", "operation": "kernel convolution"}[by] in "\n".join(rows)
    assert int(last.split()[1]) == sum(int(row[28:36]) for row in rows)


def test_an_unknown_model_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert count.main(["--model", "transformer"]) == 2
    assert capsys.readouterr().err.startswith("gpu-check: ")
