"""One run against another: the ratio of each setting that both have, and the mean over settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dpsim.harness.compare.resampling import Counts, Floats, draws, geometric_mean, interval, means, medians
from dpsim.harness.compare.runs import MeasuredRun, MeasuredSetting, SettingFields
from dpsim.records.run_comparison import MeanRatio, NotCompared, RatioPoint, RunPair, SettingValue, Verdict

LEAST_ROUNDS = 3
"""With fewer rounds the spread of a median is not known, and no difference is called one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ratio:
    """A point with its resampled ratios (``nan`` where a resample has no sample), raw and at equal speed."""

    point: RatioPoint
    resampled: Floats
    reference_resampled: Floats | None


@dataclass(frozen=True, kw_only=True)
class PairOfRuns:
    """Run ``b`` against run ``a``, with the rounds that are drawn of each."""

    a: MeasuredRun
    b: MeasuredRun
    drawn_a: Counts
    drawn_b: Counts

    @staticmethod
    def of(a: MeasuredRun, b: MeasuredRun, number: int) -> PairOfRuns:
        """Return the pair of the first run and run ``number``; the rounds of the two are drawn independently."""
        drawn_a, drawn_b = draws(max(1, a.rounds), seed=0), draws(max(1, b.rounds), seed=number)
        return PairOfRuns(a=a, b=b, drawn_a=drawn_a, drawn_b=drawn_b)

    @property
    def same_record(self) -> bool:
        """Whether both are one and the same record."""
        return self.a.run.sha256 == self.b.run.sha256

    def ratios(self) -> list[Ratio]:
        """Return the ratios of all settings that both runs have and that may be compared, in the order of ``a``."""
        refused = self._refused()
        return [
            self._ratio(setting, of_a, self.b.settings[setting])
            for setting, of_a in self.a.settings.items()
            if setting in self.b.settings and setting not in refused
        ]

    def not_compared(self) -> Iterator[NotCompared]:
        """Yield the settings of either run that are not compared, with the reason."""
        reasons = self._refused()
        for own, other in ((self.a, self.b), (self.b, self.a)):
            usable = (setting for setting in own.settings if setting not in other.settings)
            for setting in usable:
                only = f"only {own.run.label} measured it" + self._other_network(setting, own, other)
                reasons.setdefault(setting, other.unusable.get(setting, only))
            for setting, reason in own.unusable.items():
                reasons.setdefault(setting, reason)
        for setting, reason in reasons.items():
            yield NotCompared(a=self.a.run.label, b=self.b.run.label, setting=dict(setting), reason=reason)

    def _refused(self) -> dict[SettingFields, str]:
        """Return the settings of both runs that are emulated in one and real in the other, with the reason."""
        refused = {}
        for setting in self.a.settings.keys() & self.b.settings.keys():
            of_a, of_b = self.a.settings[setting], self.b.settings[setting]
            for what in ("emulated_network", "emulated_compute"):
                if getattr(of_a, what) != getattr(of_b, what):
                    emulated, real = (self.a, self.b) if getattr(of_a, what) else (self.b, self.a)
                    noun = "network" if what == "emulated_network" else "computation"
                    refused[setting] = f"the {noun} is emulated in {emulated.run.label} and real in {real.run.label}"
        return refused

    def _other_network(self, setting: SettingFields, own: MeasuredRun, other: MeasuredRun) -> str:
        """Say where the other run measured the same with the network emulated here and real there, or the reverse."""
        rest = _without_network(setting)
        emulated = own.settings[setting].emulated_network
        for theirs, measured in other.settings.items():
            if measured.emulated_network != emulated and _without_network(theirs) == rest:
                network = dict(theirs)["network"]
                return f" ({other.run.label} has it on {network}: emulated and real networks are not compared)"
        return ""

    def _ratio(self, setting: SettingFields, of_a: MeasuredSetting, of_b: MeasuredSetting) -> Ratio:
        reference, resampled_reference = self._reference(of_a, of_b)
        ratio = 1.0 if self.same_record else of_b.median.median / of_a.median.median
        resampled = (
            np.ones(len(self.drawn_a))
            if self.same_record
            else medians(of_b.samples, self.drawn_b) / medians(of_a.samples, self.drawn_a)
        )
        low, high = interval(resampled)
        noise = max((noise for noise in (of_a.noise, of_b.noise) if noise is not None), default=None)
        rounds = of_a.samples.rounds, of_b.samples.rounds
        point = RatioPoint(
            a=self.a.run.label,
            b=self.b.run.label,
            setting=dict(setting),
            group=of_a.group,
            emulated_network=of_a.emulated_network,
            emulated_compute=of_a.emulated_compute,
            a_time_s=of_a.median.median,
            a_low_s=of_a.median.low,
            a_high_s=of_a.median.high,
            a_samples=of_a.calls,
            a_rounds=rounds[0],
            b_time_s=of_b.median.median,
            b_low_s=of_b.median.low,
            b_high_s=of_b.median.high,
            b_samples=of_b.calls,
            b_rounds=rounds[1],
            ratio=ratio,
            ratio_low=low,
            ratio_high=high,
            noise=noise,
            verdict=verdict(ratio, low, high, noise, min(rounds)),
            reference_ratio=reference,
        )
        return Ratio(point=point, resampled=resampled, reference_resampled=resampled_reference)

    def _reference(self, of_a: MeasuredSetting, of_b: MeasuredSetting) -> tuple[float | None, Floats | None]:
        """Return the ratio of the reference computations of a setting, and its resampled values."""
        names = [name for name in of_a.references if name in self.a.references and name in of_b.references]
        names = [name for name in names if name in self.b.references]
        if not names:
            return None, None
        pairs = [(self.a.references[name], self.b.references[name]) for name in names]
        ratio = geometric_mean(np.array([b.time_s.mean() / a.time_s.mean() for a, b in pairs]))
        if self.same_record:
            return 1.0, np.ones(len(self.drawn_a))
        resampled = np.array([means(b, self.drawn_b) / means(a, self.drawn_a) for a, b in pairs])
        return float(ratio), geometric_mean(resampled)


def _without_network(setting: SettingFields) -> list[tuple[str, SettingValue]]:
    """Return a setting without its network, and without the algorithm, whose default depends on the network."""
    return [(name, value) for name, value in setting if name not in ("network", "algorithm")]


def verdict(ratio: float, low: float, high: float, noise: float | None, rounds: int) -> Verdict:
    """Return faster or slower where the interval excludes 1 and the ratio is further from 1 than the noise."""
    if rounds < LEAST_ROUNDS or low <= 1 <= high or abs(ratio - 1) <= (noise or 0.0):
        return "not_distinguishable"
    return "faster" if ratio < 1 else "slower"


def summary(pair: PairOfRuns, ratios: Sequence[Ratio]) -> RunPair:
    """Return the mean ratios of a pair: over all settings, over each group, and at equal speed of the machine."""
    groups = list(dict.fromkeys(ratio.point.group for ratio in ratios))
    referenced = [ratio for ratio in ratios if ratio.point.reference_ratio is not None]
    references = np.array([ratio.point.reference_ratio for ratio in referenced], np.float64)
    return RunPair(
        a=pair.a.run.label,
        b=pair.b.run.label,
        same_record=pair.same_record,
        overall=_mean("all", ratios),
        groups=tuple(_mean(group, [ratio for ratio in ratios if ratio.point.group == group]) for group in groups),
        reference_ratio=float(geometric_mean(references)) if len(referenced) == len(ratios) else None,
        at_equal_speed=_mean("at equal speed", ratios, equal_speed=True) if len(referenced) == len(ratios) else None,
    )


def _mean(name: str, ratios: Sequence[Ratio], *, equal_speed: bool = False) -> MeanRatio:
    measured, resampled, verdicts = [], [], []
    for each in ratios:
        point, divisor, divisors = each.point, 1.0, np.ones(1)
        if equal_speed and each.reference_resampled is not None:
            divisor, divisors = point.reference_ratio or 1.0, each.reference_resampled
        ratio, values = point.ratio / divisor, each.resampled / divisors
        measured.append(ratio)
        resampled.append(values)
        rounds = min(point.a_rounds, point.b_rounds)
        verdicts.append(verdict(ratio, *interval(values), point.noise, rounds) if equal_speed else point.verdict)
    low, high = interval(geometric_mean(np.array(resampled)))
    counts = Counter(verdicts)
    return MeanRatio(
        name=name,
        settings=len(ratios),
        ratio=float(geometric_mean(np.array(measured))),
        low=low,
        high=high,
        faster=counts["faster"],
        slower=counts["slower"],
        not_distinguishable=counts["not_distinguishable"],
    )
