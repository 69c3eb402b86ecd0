"""The study of loss against staleness: its orders, and what it predicts of a staleness that it was not given."""

from __future__ import annotations

import numpy as np
import pytest

from dpsim.experiments.staleness_loss import constant, left_out


def test_an_order_has_one_staleness_after_its_first_updates() -> None:
    assert constant(3, 10).staleness == {0: 1, 1: 1, 2: 1, 3: 7}
    assert constant(0, 4).staleness == {0: 4}


def test_a_left_out_loss_is_predicted_from_the_others_alone() -> None:
    staleness = (0, 1, 2, 4, 8)
    loss = [float(np.exp(0.1 + 0.2 * each + 0.01 * each**2)) for each in staleness]
    assert left_out(staleness, loss, 2)[0] == pytest.approx(loss[2])
    changed = [*loss[:2], 99.0, *loss[3:]]
    assert left_out(staleness, changed, 2) == left_out(staleness, loss, 2)
    assert left_out(staleness, loss, 2)[1] == pytest.approx(np.mean([loss[0], loss[1], loss[3], loss[4]]))
