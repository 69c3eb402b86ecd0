"""``RunComparison``: measurements of several runs, setting by setting, as rows under the names of ``--json``.

``dpsim.harness.compare`` derives them; nothing is computed in this module. (The comparison of one run's measurements
with its predictions is in ``dpsim.records.comparison``.)
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from dpsim.codec import Noun
from dpsim.records.sweep import Environment

Row = dict[str, Any]


class ComparedRun(Noun, frozen=True):
    """One of the runs: where it was read, where and when it was measured, and what it declared.

    ``sha256`` is the digest of the record of the measurement. ``declared`` is what a run declares beyond the settings
    of its points, such as the model and the optimizer. ``settings`` is how many settings it measured.
    """

    label: str
    path: str
    sha256: str
    environment: Environment
    declared: dict[str, str]
    measured_from: str
    measured_until: str
    settings: int


class RunComparison(NamedTuple):
    """Several runs of one kind compared with the first of them; ``quantity`` names the time that is compared.

    - ``points``: a ``setting``, the fields that name it, that runs ``a`` and ``b`` both measured. ``a_time_s`` and
      ``b_time_s`` are medians with their 95 % intervals, ``ratio`` = time of ``b`` / time of ``a``: below 1 ``b`` is
      faster. ``ratio_low`` and ``ratio_high`` are its 95 % interval. It holds for the rounds of these two runs, and
      knows nothing of what changed on the machine between them. ``noise`` is the larger A/A difference of the two runs
      (``None``: neither has an A/A pair). ``verdict`` is faster or slower where the interval does not contain 1 and the
      ratio differs from 1 by more than the noise, else not_distinguishable. ``group`` is the network of a sweep's
      setting, and the system of a benchmark's.
    - ``pairs``: run ``b`` against run ``a``: the geometric mean of the ratios ``overall`` and in each of ``groups``,
      with its 95 % interval, and how many settings have each verdict.
    - ``not_compared``: a ``setting`` that was not compared between ``a`` and ``b``, and the ``reason``.
    """

    kind: Literal["sweep", "bench allreduce"]
    quantity: str
    runs: tuple[ComparedRun, ...]
    points: list[Row]
    pairs: list[Row]
    not_compared: list[Row]
