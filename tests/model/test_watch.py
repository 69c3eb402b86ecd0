"""What the records of a watched job say: who is slow, what a bucket cap gains, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from watched_ranks import BACKWARD_S, LAYERS, a_rank

from dpsim.cli.job import _json_line
from dpsim.errors import ConfigError
from dpsim.model.observed import Steps
from dpsim.model.watch import watched
from dpsim.report.watch import advice, logged
from dpsim.torch.script.watched import observed, watched_workload


def test_a_slow_rank_is_named_with_what_the_others_wait() -> None:
    seen = watched([a_rank(1, late_s=0.030), a_rank(0)])
    parts = {part.kind: part for part in seen.explained.parts}
    assert parts["slowest rank"].seconds == pytest.approx(0.030)
    assert parts["slowest rank"].text.startswith("rank 1, which takes 130 ms itself where rank 0 takes 100 ms")
    assert parts["communication"].seconds == pytest.approx(0.010)
    assert seen.explained.step_s == pytest.approx(0.140)


def test_a_job_that_reduces_in_each_micro_batch_is_told_what_deferring_saves() -> None:
    ranks = [a_rank(0), a_rank(1)]
    for number, rank in enumerate(ranks):
        steps = [msgspec.structs.replace(step, update_s=0.005 * (at % 4 == 3)) for at, step in enumerate(rank.steps)]
        ranks[number] = msgspec.structs.replace(rank, steps=tuple(steps))
    sentence = "4 micro-batches reduce 4 times; deferring (no_sync) would save 120 ms of 560 ms"
    assert watched(ranks).explained.notes[0].startswith(sentence)
    assert not any("deferring" in note for note in watched([a_rank(0), a_rank(1)]).explained.notes)


def test_the_workload_has_the_gradients_as_they_were_ready() -> None:
    ranks = [a_rank(0), a_rank(1)]
    workload = watched_workload(ranks, Steps(observed(ranks)))
    assert [layer.name for layer in workload.layers] == [str(number) for number in range(LAYERS)]
    assert [layer.backward_s[0] for layer in workload.layers] == pytest.approx([BACKWARD_S / LAYERS] * LAYERS)
    assert sum(layer.forward_s[0] for layer in workload.layers) == pytest.approx(0.015)
    assert workload.update_s == pytest.approx(0.005)


def test_a_bucket_that_nothing_hides_is_better_in_parts() -> None:
    seen = watched([a_rank(0), a_rank(1)])
    best = seen.advised
    assert best is not None and best.buckets > 1 and 1.2 < best.low <= best.high < 1.4
    assert advice(seen)[-1] == f"DistributedDataParallel(model, bucket_cap_mb={best.cap_bytes / 2**20:.15g})"


def test_a_line_of_json_has_the_parts_and_the_advice() -> None:
    seen = watched([a_rank(0), a_rank(1)])
    line = _json_line(seen)
    shown = json.loads(line)
    assert "\n" not in line and shown["command"] == "explain"
    assert sum(point["seconds"] for point in shown["points"]) == pytest.approx(shown["summary"]["step_s"])
    assert shown["summary"]["advice"] == advice(seen)


def test_the_jobs_logger_gets_a_slow_rank_and_a_cap_where_there_is_one() -> None:
    even, uneven = (logged(watched([a_rank(1, late_s=late_s), a_rank(0)])) for late_s in (0.0, 0.030))
    assert even["dpsim/exposed_ms"] == pytest.approx(40) and uneven["dpsim/exposed_ms"] == pytest.approx(10)
    assert even["dpsim/waiting_ms"] == pytest.approx(0) and uneven["dpsim/waiting_ms"] == pytest.approx(30)
    assert "dpsim/slow_rank" not in even and uneven["dpsim/slow_rank"] == 1
    assert str(even["dpsim/advice"]).endswith(f"bucket_cap_mb={even['dpsim/advised_bucket_cap_mb']:.15g})")


def test_where_ranks_compute_on_all_cores_smaller_buckets_may_gain_nothing() -> None:
    seen = watched([a_rank(rank, cores=2) for rank in (0, 1)])
    assert seen.caps and max(each.high for each in seen.caps) > 1.2
    assert seen.advised is None
    assert advice(seen)[0].startswith("Leave the bucket cap (1 bucket)")


def test_without_exposed_communication_no_cap_is_advised() -> None:
    seen = watched([a_rank(rank, exposed_s=0.0) for rank in (0, 1)])
    assert not seen.caps and advice(seen) == [
        "No bucket cap is advised for its 1 bucket: its allreduces end with backward."
    ]


def test_ranks_that_stop_at_other_steps_are_compared_at_the_same_ones() -> None:
    longer = a_rank(0)
    shorter = msgspec.structs.replace(a_rank(1), steps=a_rank(1).steps[:5])
    assert [len(rank.steps) for rank in observed([longer, shorter]).ranks] == [5, 5]


def test_a_rank_that_was_not_seen_is_said() -> None:
    assert any("only ranks 0 of 2" in note for note in watched([a_rank(0)]).explained.notes)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"ranks": 1}, "one rank"),
        ({"reason": "it trains two models"}, "it trains two models"),
        ({"steps": ()}, "ended after 0 steps"),
    ],
)
def test_what_says_nothing_is_refused(changes: dict[str, Any], given: str) -> None:
    with pytest.raises(ConfigError, match=given):
        watched([a_rank(0, **changes)])
