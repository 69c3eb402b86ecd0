"""The baseline of a script: a later run held against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.harness.reproduce.baseline import Baseline, compare_with_baseline, read_baseline
from dpsim.harness.reproduce.script import ScriptComparison
from dpsim.torch.script.reproduce.rounding import ALLOWANCE

TRAINING = ScriptComparison(script="train.py", devices=(1, 2)).training
BASELINE = Baseline(
    training=TRAINING,
    losses=(2.5, 2.0, 1.5),
    rounding=(1e-7, 2e-7, 4e-7),
    digests=("a", "b", "c"),
    environment={"PyTorch": "2.13.0", "threads": "1"},
)


def test_the_same_bits_are_the_same() -> None:
    held = compare_with_baseline(BASELINE, BASELINE)
    assert not held.differs and held.sentences == ("The 3 steps are those of the baseline to the bit.",)


@given(step=st.integers(0, 2), times=st.floats(0.0, 100.0), sign=st.sampled_from([-1, 1]))
def test_a_loss_may_differ_by_rounding_and_by_no_more(step: int, times: float, sign: int) -> None:
    moved = list(BASELINE.losses)
    moved[step] = BASELINE.losses[step] + sign * times * BASELINE.rounding[step]  # type: ignore[operator]
    held = compare_with_baseline(replace(BASELINE, losses=tuple(moved)), BASELINE)
    if abs(times - ALLOWANCE) > 0.1:
        assert held.differs == (times > ALLOWANCE)
        assert not held.differs or f"the loss of step {step + 1} is" in held.sentences[0]


def test_other_bits_count_in_an_equal_environment_alone() -> None:
    other = replace(BASELINE, digests=("a", "x", "y"))
    held = compare_with_baseline(other, BASELINE)
    assert held.differs and "from step 2 on, in an equal environment" in held.sentences[1]
    elsewhere = compare_with_baseline(replace(other, environment={"PyTorch": "2.14.0", "threads": "1"}), BASELINE)
    assert not elsewhere.differs
    assert elsewhere.sentences[1] == "Bits are not compared: PyTorch 2.13.0 there, 2.14.0 here."


def test_a_loss_that_is_no_number_on_one_side_differs() -> None:
    nan = replace(BASELINE, losses=(2.5, 2.0, None))
    assert "step 3 is not a number, and was 1.5." in compare_with_baseline(nan, BASELINE).sentences[0]
    assert "step 3 is 1.5, and was not a number." in compare_with_baseline(BASELINE, nan).sentences[0]
    assert not compare_with_baseline(nan, nan).differs


def test_fewer_steps_are_compared_as_far_as_they_go() -> None:
    short = replace(BASELINE, losses=BASELINE.losses[:2], rounding=BASELINE.rounding[:2], digests=BASELINE.digests[:2])
    assert "The 2 steps" in compare_with_baseline(short, BASELINE).sentences[0]


def test_a_baseline_of_another_training_is_refused(tmp_path: Path) -> None:
    codec.write(tmp_path / "baseline.json", BASELINE)
    assert read_baseline(tmp_path / "baseline.json", TRAINING) == BASELINE
    other = ScriptComparison(script="train.py", arguments=("--lr", "1"), devices=(2, 1), compute_dtype="bfloat16")
    with pytest.raises(ConfigError) as raised:
        read_baseline(tmp_path / "baseline.json", other.training)
    for words in ("devices 1 there, 2 here", "type float32 there, bfloat16 here", "arguments none there, --lr 1 here"):
        assert words in str(raised.value)
    (tmp_path / "baseline.json").write_text('{"schema": "dpsim.sweep/1"}')
    with pytest.raises(FileFormatError):
        read_baseline(tmp_path / "baseline.json", TRAINING)
