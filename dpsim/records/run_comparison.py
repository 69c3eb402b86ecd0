"""``RunComparison``: measurements of several runs, setting by setting.

``dpsim.harness.compare`` derives them; nothing is computed in this module. (The comparison of one run's measurements
with its predictions is in ``dpsim.records.comparison``.)
"""

from __future__ import annotations

from typing import Literal

from dpsim.codec import Noun
from dpsim.records.sweep import Environment

Verdict = Literal["faster", "slower", "not_distinguishable"]
SettingValue = str | int | float | bool | None


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


class RatioPoint(Noun, frozen=True):
    """One setting that runs ``a`` and ``b`` both measured.

    - Times are medians with their 95 % intervals; ``ratio`` = time of ``b`` / time of ``a``: below 1 ``b`` is faster.
    - ``ratio_low`` and ``ratio_high`` are its 95 % interval. It holds for the rounds of these two runs, and knows
      nothing of what changed on the machine between them.
    - ``noise`` is the larger A/A difference of the two runs (``None``: neither has an A/A pair).
    - ``verdict`` is faster or slower where the interval does not contain 1 and the ratio differs from 1 by more than
      the noise.
    """

    a: str
    b: str
    setting: dict[str, SettingValue]
    group: str
    emulated_network: bool
    emulated_compute: bool
    a_time_s: float
    a_low_s: float
    a_high_s: float
    a_samples: int
    a_rounds: int
    b_time_s: float
    b_low_s: float
    b_high_s: float
    b_samples: int
    b_rounds: int
    ratio: float
    ratio_low: float
    ratio_high: float
    noise: float | None
    verdict: Verdict


class MeanRatio(Noun, frozen=True):
    """The geometric mean of the ratios of several settings, with its 95 % interval, and how many have each verdict."""

    name: str
    settings: int
    ratio: float
    low: float
    high: float
    faster: int
    slower: int
    not_distinguishable: int


class RunPair(Noun, frozen=True):
    """Run ``b`` against run ``a``: over all settings, and for each group of them (a network, or a system)."""

    a: str
    b: str
    same_record: bool
    overall: MeanRatio
    groups: tuple[MeanRatio, ...]


class NotCompared(Noun, frozen=True):
    """A setting that was not compared between ``a`` and ``b``, and why."""

    a: str
    b: str
    setting: dict[str, SettingValue]
    reason: str


class RunComparison(Noun, frozen=True):
    """Several runs of one kind compared with the first of them.

    ``kind`` is that of the records; ``quantity`` names the time that is compared.
    """

    kind: Literal["sweep", "bench allreduce"]
    quantity: str
    runs: tuple[ComparedRun, ...]
    points: tuple[RatioPoint, ...]
    pairs: tuple[RunPair, ...]
    not_compared: tuple[NotCompared, ...]
