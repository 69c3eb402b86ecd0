"""Steps that were observed on every rank: the rank that others wait for, contention, and that the parts add up."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from dpsim.errors import ConfigError
from dpsim.model.explanation import Explanation, summed
from dpsim.model.observed import Observed, ObservedRank, ObservedStep, Steps, exposed_buckets, joined, observed_parts

COUNT = 20
EXPOSED_S = 0.01


def observed(
    *computed_s: float,
    input_s: float = 0.0,
    delayed_s: float = 0.0,
    exposed_s: float = EXPOSED_S,
    steps: int = COUNT,
) -> Observed:
    """Ranks that compute for these seconds in each step, and then wait for the last of them and for two buckets."""
    own_s = [each + input_s + delayed_s for each in computed_s]
    length_s = max(own_s) + exposed_s

    def rank(computed_s: float, own_s: float) -> ObservedRank:
        begins_s = [number * length_s for number in range(steps)]
        return ObservedRank(
            steps=tuple(
                ObservedStep(
                    began_s=begin_s,
                    computed_s=begin_s + own_s,
                    ended_s=begin_s + length_s,
                    forward_s=(computed_s + delayed_s) / 3,
                    backward_s=(computed_s + delayed_s) * 2 / 3,
                    update_s=0.0,
                    input_s=input_s,
                    delayed_s=delayed_s,
                    ready_s=(begin_s + own_s / 2, begin_s + own_s),
                    done_s=(begin_s + max(own_s, length_s - exposed_s), begin_s + length_s),
                )
                for begin_s in begins_s
            ),
            bucket_bytes=(1024, 2048),
            local_batch=4,
        )

    return Observed(ranks=tuple(map(rank, computed_s, own_s)))


def explained(of: Observed) -> Explanation:
    steps = Steps(of)
    return summed("job", "2 ranks", float(steps.step_s.mean()), observed_parts(steps), "test")


def seconds(of: Explanation) -> dict[str, float]:
    return {part.kind: part.seconds for part in of.parts}


def test_a_slow_rank_is_named_with_its_own_time_and_what_the_others_wait() -> None:
    found = explained(observed(0.1, 0.3))
    assert [part.kind for part in found.causes] == ["slowest rank"]
    (cause,) = found.causes
    assert cause.seconds == pytest.approx(0.2)
    assert cause.text.startswith("rank 1, which takes 300 ms itself where rank 0 takes 100 ms")
    assert "waits 200 ms for the last rank" in cause.details[0]
    assert "waits 0 s for the last rank" in cause.details[1]


def sharded(*before_s: tuple[float, ...], collective_s: float = 0.005) -> Observed:
    """Ranks that compute so long before each collective of a step, two gathers and a reduce-scatter, and wait there."""
    reached_s = [max(moments) for moments in zip(*before_s, strict=True)]
    length_s = sum(reached_s) + 3 * collective_s

    def rank(own_s: tuple[float, ...]) -> ObservedRank:
        spans = [collective_s + last - own for last, own in zip(reached_s, own_s, strict=True)]
        steps = (
            ObservedStep(
                began_s=number * length_s,
                computed_s=number * length_s + sum(own_s),
                ended_s=(number + 1) * length_s,
                forward_s=sum(own_s),
                backward_s=0.0,
                update_s=0.0,
                input_s=0.0,
                gather_s=tuple(spans[:2]),
                reduce_scatter_s=tuple(spans[2:]),
            )
            for number in range(COUNT)
        )
        sizes: dict[str, Any] = {"units": 2, "gather_bytes": (1024, 2048), "reduce_scatter_bytes": (2048,)}
        return ObservedRank(steps=tuple(steps), bucket_bytes=(1024, 2048), local_batch=4, **sizes)

    return Observed(ranks=tuple(map(rank, before_s)))


def test_of_shards_the_last_rank_to_come_to_a_collective_is_waited_for_and_its_time_there_is_communication() -> None:
    found = explained(sharded((0.1, 0.1, 0.1), (0.2, 0.1, 0.1)))
    assert seconds(found) == pytest.approx(
        {
            "computation": 0.3,
            "input": 0.0,
            "contention": 0.0,
            "slowest rank": 0.1,
            "communication": 0.015,
            "unexplained": 0.0,
        }
    )
    assert [part.kind for part in found.causes] == ["slowest rank"] and "rank 1, which" in found.causes[0].text
    assert "waits 100 ms for the last rank" in found.causes[0].details[0]
    details = next(part.details for part in found.parts if part.kind == "communication")
    assert details == ("2 gathers of 1 KiB to 2 KiB: 10 ms", "1 reduce-scatter of 2 KiB: 5 ms")


def test_of_shards_ranks_that_wait_for_each_other_within_a_step_wait_for_no_rank_alone() -> None:
    found = explained(sharded((0.1, 0.3, 0.1), (0.3, 0.1, 0.1)))
    assert seconds(found)["slowest rank"] == pytest.approx(0.2) and seconds(found)["computation"] == pytest.approx(0.5)
    assert found.causes[0].text.startswith("whichever rank is the slowest")


def test_healthy_shards_have_no_cause() -> None:
    assert explained(sharded((0.1, 0.1, 0.1), (0.1, 0.1, 0.1))).causes == ()


def test_of_four_ranks_the_slow_one_is_held_against_the_lower_median() -> None:
    found = explained(observed(0.1, 0.12, 0.4, 0.11))
    assert seconds(found)["slowest rank"] == pytest.approx(0.4 - 0.11)
    assert "rank 2" in found.causes[0].text


def test_two_causes_are_both_named_the_larger_first() -> None:
    found = explained(observed(0.1, 0.3, input_s=0.15))
    assert [part.kind for part in found.causes] == ["slowest rank", "input"]
    assert seconds(found)["input"] == pytest.approx(0.15)


def test_time_without_a_core_is_contention_and_no_computation() -> None:
    found = explained(observed(0.1, 0.1, delayed_s=0.08))
    assert [part.kind for part in found.causes] == ["contention"]
    assert seconds(found)["computation"] == pytest.approx(0.1)
    assert seconds(found)["contention"] == pytest.approx(0.08)


def with_steps(of: Observed, **fields: Any) -> Observed:
    """The same ranks; a field of step i is what its function gives for i and the step."""
    ranks = [
        msgspec.structs.replace(
            rank,
            steps=tuple(
                msgspec.structs.replace(step, **{name: value(i, step) for name, value in fields.items()})
                for i, step in enumerate(rank.steps)
            ),
        )
        for rank in of.ranks
    ]
    return msgspec.structs.replace(of, ranks=tuple(ranks))


def test_a_wait_for_a_core_while_loading_takes_nothing_from_the_computation() -> None:
    of = observed(0.1, 0.1, input_s=0.05, delayed_s=0.04)
    of = with_steps(
        of,
        forward_s=lambda _, step: step.forward_s - 0.03,
        input_s=lambda _, step: step.input_s + 0.03,
        computing_delayed_s=lambda *_: 0.01,
        input_delayed_s=lambda *_: 0.03,
    )
    found = explained(of)
    assert seconds(found)["computation"] == pytest.approx(0.1)
    assert seconds(found)["input"] == pytest.approx(0.05)
    assert seconds(found)["contention"] == pytest.approx(0.04)
    assert seconds(found)["unexplained"] == pytest.approx(0.0, abs=1e-12)


def test_computation_is_that_of_clean_steps_and_what_others_take_longer_is_contention() -> None:
    """Every other step waits 10 ms for a core, and computes 20 ms longer beside that, as with cold caches."""
    of = with_steps(
        observed(0.15, 0.15, exposed_s=0.05),
        forward_s=lambda i, step: step.forward_s - 0.03 * (i % 2 == 0),
        computed_s=lambda i, step: step.computed_s - 0.03 * (i % 2 == 0),
        ended_s=lambda i, step: step.ended_s - 0.03 * (i % 2 == 0),
        delayed_s=lambda i, _: 0.01 * (i % 2),
        computing_delayed_s=lambda i, _: 0.01 * (i % 2),
        input_delayed_s=lambda *_: 0.0,
    )
    steps = Steps(of)
    parts = seconds(explained(of))
    assert parts["computation"] == pytest.approx(0.12)
    assert parts["contention"] == pytest.approx(0.005 + 0.01)
    assert parts["unexplained"] == pytest.approx(0.0, abs=1e-12)
    assert steps.clean_share == ", 50% of them undisturbed by other threads"


def test_without_any_wait_for_a_core_it_is_not_known_which_steps_are_clean() -> None:
    assert (Steps(observed(0.1, 0.1)).clean, Steps(observed(0.1, 0.1)).clean_share) == (None, "")


def test_what_backward_does_not_hide_is_communication_by_bucket() -> None:
    of = observed(0.1, 0.1, exposed_s=0.05)
    assert [part.kind for part in explained(of).causes] == ["communication"]
    assert exposed_buckets(Steps(of)) == ("bucket 2 of 2 (2 KiB): 50 ms",)


def test_a_healthy_job_has_no_cause() -> None:
    assert explained(observed(0.1, 0.101, exposed_s=0.004)).causes == ()


@pytest.mark.parametrize("of", [observed(0.1, 0.3, input_s=0.02, delayed_s=0.01), observed(0.2, 0.1, 0.15)])
def test_the_parts_add_up_to_the_step(of: Observed) -> None:
    found = explained(of)
    assert math.fsum(seconds(found).values()) == pytest.approx(found.step_s, rel=1e-12)
    assert seconds(found)["unexplained"] == pytest.approx(0.0, abs=1e-12)


def test_runs_are_joined_step_by_step() -> None:
    both = joined([observed(0.1, 0.1), observed(0.1, 0.1)])
    assert [len(rank.steps) for rank in both.ranks] == [2 * COUNT, 2 * COUNT]


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 steps were observed"):
        Steps(observed(0.1, 0.1, steps=2))
