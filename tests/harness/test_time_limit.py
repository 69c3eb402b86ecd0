"""How long a measurement takes on a machine that is slower than its budget allows, by a clock that the visits move."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpsim import codec
from dpsim.plan import Plan
from dpsim.records.sweep import Experiment, MeasuredPoint
from dpsim.setting import Setting
from dpsim.study.loop import LEAST_ROUNDS
from dpsim.study.measure import WARM_UP_ROUNDS, measure
from dpsim.study.runners.script_processes import starting_together
from dpsim.study.setting_samples import SettingSamples
from dpsim.study.task import Samples
from dpsim.study.time_limit import FEWEST_ROUNDS, cut, first_rounds_text, limit_s, order_of_leaving


def setting(number: int, devices: int = 2, repeat: int = 0) -> Setting:
    threshold = None if devices == 1 else 1024.0 * number
    plan = Plan(devices=devices, global_batch=64, fusion_threshold_bytes=threshold, algorithm="ring")
    return Setting(model="mlp:8", plan=plan, repeat=repeat)


SETTINGS = [setting(0, devices=1), *map(setting, range(1, 9)), setting(1, repeat=1)]


class Visit:
    """A visit that takes ``seconds``, of a setting or of what is visited beside the settings."""

    def __init__(self, clock: list[float], seconds: float, of: Setting) -> None:
        self.setting, self.samples, self._clock, self._seconds = of, SettingSamples(of, None), clock, seconds
        self.rounds: Counter[bool] = Counter()

    def visit(self, number: int, *, counted: bool) -> bool:
        self.rounds[counted] += 1
        self._clock[0] += self._seconds
        if counted:
            step_s = 1.0 + number % 2  # never narrow
            self.samples.add({"step_s": step_s, "exposed_communication_s": 0.0, "round": number})
        return True

    def point(self) -> MeasuredPoint:
        return self.samples.point(buckets=1, events_per_step=0, timeline=None)


def run(tmp_path: Path, visit_s: float, budget_s: float) -> tuple[list[Visit], list[Visit], Samples, float, list[str]]:
    clock, said = [0.0], list[str]()
    visitors = [Visit(clock, visit_s, each) for each in SETTINGS]
    beside = [Visit(clock, visit_s, SETTINGS[0]) for _ in range(2)]
    before: Any = Samples(
        points=(),
        spent_s=0.0,
        measured_from="",
        experiment=Experiment(),
        predictions_sha256="",
        recording_s_per_event=0.0,
    )
    samples = measure(
        visitors,
        before,
        tmp_path / "samples.json",
        said.append,
        budget_s=budget_s,
        limit_s=limit_s(budget_s),
        interval=0.02,
        seed=1,
        beside=[*beside, *beside],
        clock=lambda: clock[0],
    )
    assert samples is not None and codec.read(tmp_path / "samples.json", Samples, "samples", samples.schema)
    return visitors, beside, samples, clock[0], said


def test_on_a_quiet_machine_nothing_is_left_out(tmp_path: Path) -> None:
    visitors, beside, samples, spent_s, said = run(tmp_path, 0.1, 45.0)
    assert (len(samples.points) == len(SETTINGS) and said == []) or all("warning" not in text for text in said)
    assert visitors[0].rounds[False] == WARM_UP_ROUNDS and visitors[0].rounds[True] > LEAST_ROUNDS
    assert beside[0].rounds[True] == 2 * visitors[0].rounds[True] and 45 <= spent_s < 47


@pytest.mark.parametrize(("visit_s", "budget_s"), [(0.8, 10.0), (2.0, 10.0), (1.8, 45.0), (6.0, 45.0), (20.0, 240.0)])
def test_a_slow_machine_takes_no_longer_than_the_limit_and_a_round(
    tmp_path: Path, visit_s: float, budget_s: float
) -> None:
    visitors, _, samples, spent_s, said = run(tmp_path, visit_s, budget_s)
    assert spent_s <= limit_s(budget_s) + 0.5 * len(SETTINGS) * visit_s
    measured = {point.setting for point in samples.points}
    rounds = max(visitor.rounds[True] for visitor in visitors)
    assert rounds >= FEWEST_ROUNDS
    if len(measured) < len(SETTINGS):
        (named,) = [text for text in said if "left out" in text][-1:]
        assert all(each.describe() in named for each in SETTINGS if each not in measured)
        assert rounds < LEAST_ROUNDS


def test_rounds_are_cut_before_settings(tmp_path: Path) -> None:
    _, _, samples, _, said = run(tmp_path, 0.5, 10.0)
    assert len(samples.points) == len(SETTINGS) and "rounds were measured, where 6 are usual" in said[-1]
    few = cut([1.0] * 5, range(5), (2.0, 1.0), 22.0, usual_rounds=6, fewest_rounds=3)
    assert few.rounds and not few.beside and few.settings == ()
    assert cut([1.0] * 5, range(5), (2.0, 1.0), 18.0, usual_rounds=6, fewest_rounds=3).beside
    assert cut([1.0] * 5, [3, 1, 0, 2, 4], (2.0, 1.0), 12.0, usual_rounds=6, fewest_rounds=3).settings == (1, 3)


def test_two_settings_stay_whatever_they_take() -> None:
    assert len(cut([9.0] * 5, range(5), (2.0, 1.0), 0.0, usual_rounds=6, fewest_rounds=3).settings) == 3


def test_what_stays_spreads_over_the_settings() -> None:
    longest = [SETTINGS[index] for index in reversed(order_of_leaving(SETTINGS))]
    assert longest[0] == SETTINGS[0] and {each.first_run for each in longest[:4]} == {
        SETTINGS[0],
        SETTINGS[8],
        SETTINGS[4],
    } | {longest[3].first_run}
    assert sorted(order_of_leaving(SETTINGS)) == list(range(len(SETTINGS)))
    pair = [longest.index(SETTINGS[1]), longest.index(SETTINGS[9])]
    assert pair[1] == pair[0] + 1


def test_few_processes_of_a_script_start_at_once_and_every_member_as_a_whole() -> None:
    assert starting_together([1, 2, 2, 2, 4, 2, 1, 2, 1]) == [[0, 1, 2], [3, 4], [5, 6, 7], [8]]
    assert starting_together([8, 1]) == [[0], [1]] and starting_together([1]) == [[0]]


def test_the_first_rounds_are_announced_with_the_most_that_they_take() -> None:
    assert first_rounds_text(2.5) == "2.5 to 5 s, 15 s at most"
    assert first_rounds_text(12.0, times=2) == "12 to 24 s, 44 s at most"
