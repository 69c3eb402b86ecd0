"""The gap of batch norm against the local batch: fits recover their own curves, and refuse what says nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.model.norm_gap import FORM, FORMS, GapFit, fit_gap, interpolated_gap


@given(st.sampled_from(sorted(FORMS)), st.floats(0.1, 20), st.floats(0.3, 3), st.sampled_from([64, 128]))
def test_a_fit_predicts_the_held_out_gaps_of_a_curve_of_its_own_form(
    form: str, scale: float, shape: float, total: int
) -> None:
    curve = GapFit(form=form, global_batch=total, scale=scale, shape=shape)
    fit = fit_gap({b: curve.gap(b) for b in (2, 16)}, total, form)
    for held_out in (4, 8, 32):
        assert fit.gap(held_out) == pytest.approx(curve.gap(held_out), rel=0.01)


def test_the_saturating_form_is_proportional_to_small_noise_and_bounded_for_large() -> None:
    fit = GapFit(form=FORM, global_batch=4096, scale=3.0, shape=2.0)
    assert fit.gap(2048) == pytest.approx(3 * (1 / 2048 - 1 / 4096), rel=1e-3)
    assert fit.gap(4096) == 0
    assert max(fit.gap(b) for b in (1, 2, 4)) < 3 / 2


def test_too_few_batches_and_an_absent_gap_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="fitted to 1 local batches"):
        fit_gap({2: 0.5, 64: 0.0}, 64)
    with pytest.raises(ConfigError, match="no gap is visible at local batch 16"):
        fit_gap({2: 0.5, 16: -0.01}, 64)
    with pytest.raises(ConfigError, match="did you mean 'saturating'"):
        fit_gap({2: 0.5, 16: 0.1}, 64, "saturated")


def test_the_baseline_is_linear_in_the_logarithm_of_the_batch_and_0_at_the_global_one() -> None:
    gaps = {2: 1.0, 16: 0.4}
    assert interpolated_gap(gaps, 64, 16) == pytest.approx(0.4)
    assert interpolated_gap(gaps, 64, 32) == pytest.approx(0.2)
    assert interpolated_gap(gaps, 64, 4) == pytest.approx(0.8)
    assert interpolated_gap(gaps, 64, 1) == pytest.approx(1.2)
    assert np.isclose(interpolated_gap(gaps, 64, 64), 0)
