"""Records that do not belong to the watched job, or that nobody can use: a sentence each, and never a mixture."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from watched_ranks import a_rank

from dpsim import codec
from dpsim.cli import job as cli_job
from dpsim.cli.job import said
from dpsim.errors import ConfigError
from dpsim.torch.script.watch_records import complete, paired, read
from dpsim.torch.script.watched import WatchedRank


def later(record: WatchedRank, seconds: float, **changes: Any) -> WatchedRank:
    steps = tuple(
        msgspec.structs.replace(
            step,
            **{name: getattr(step, name) + seconds for name in ("began_s", "computed_s", "ended_s")},
        )
        for step in record.steps
    )
    return msgspec.structs.replace(record, steps=steps, **changes)


def written(folder: Path, *records: WatchedRank) -> list[Path]:
    paths = [folder / f"rank-{record.rank}-{number}.json" for number, record in enumerate(records)]
    for path, record in zip(paths, records, strict=True):
        codec.write(path, record)
    return paths


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"rank": 0}', None])
def test_a_record_that_cannot_be_read_is_a_note_beside_the_others(content: bytes | None, tmp_path: Path) -> None:
    files = written(tmp_path, a_rank(0), a_rank(1))
    other = tmp_path / "rank-a.json"
    other.mkdir() if content is None else other.write_bytes(content)
    answer = said([*files, other]).text
    assert "on 2 ranks" in answer and "Note: the record rank-a.json is not used: " in answer
    alone = said([other]).text
    assert alone.startswith("dpsim: nothing was learned of the job")
    assert "DistributedDataParallel or fully_shard that can be used" in alone


STEP = a_rank(0).steps[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": 2}, "rank 2 of 2"),
        ({"ranks_here": 0}, "0 on this machine"),
        ({"local_batch": 0}, "below 1"),
        ({"torch": "newest"}, "version"),
        ({"rebuilt": "0 1 2 3 4 5 6 99"}, "each of its parameters once"),
        ({"rebuilt": "x"}, "no numbers"),
        ({"initial_bucket_bytes": "1 2"}, "no numbers"),
        ({"loss_s": ()}, "as many times"),
        ({"own_s": 1e304}, "no number of seconds"),
        ({"steps": (msgspec.structs.replace(STEP, ended_s=0.0), *a_rank(0).steps[1:])}, "clock has jumped"),
        ({"steps": tuple(msgspec.structs.replace(step, input_s=5.0) for step in a_rank(0).steps)}, "longer than"),
        ({"steps": tuple(msgspec.structs.replace(step, input_delayed_s=-1.0) for step in a_rank(0).steps)}, "below 0"),
        ({"steps": tuple(msgspec.structs.replace(step, delayed_s=5.0) for step in a_rank(0).steps)}, "longer than"),
        ({"steps": (msgspec.structs.replace(STEP, update_s=-1.0), *a_rank(0).steps[1:])}, "below 0"),
    ],
)
def test_numbers_that_no_job_has_are_told(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    records, notes = read(written(tmp_path, msgspec.structs.replace(a_rank(0), **changes)))
    assert not records and problem in notes[0]


def test_a_time_that_is_no_number_is_told(tmp_path: Path) -> None:
    (path,) = written(tmp_path, a_rank(0))
    path.write_text(path.read_text().replace('"began_s": 5.0', '"began_s": NaN', 1))
    assert "NaN is not a JSON number" in read([path])[1][0]


def test_ranks_of_an_earlier_attempt_are_left_out() -> None:
    old = [later(a_rank(rank), -100, run="job attempt 0") for rank in (0, 1)]
    new = [a_rank(rank, run="job attempt 1") for rank in (0, 1)]
    ranks, notes = paired([old[1], *new])
    assert ranks == new
    assert notes == ["ranks 1 of 2 of another attempt (train.py) were seen too, and are left out"]
    ranks, notes = paired([*old, new[0]])
    assert ranks == old and "ranks 0 of 2 of another attempt" in notes[0]
    ranks, _ = paired([*old, *new])
    assert ranks == new, "of two whole attempts the later"


def test_two_jobs_below_one_command_are_told(tmp_path: Path) -> None:
    one, two = ([a_rank(rank, run=f"localhost:{port} attempt 0") for rank in (0, 1)] for port in (1, 2))
    ranks, notes = paired([one[0], two[1], two[0], one[1]])
    assert {record.run for record in ranks} in ({one[0].run}, {two[0].run}) and len(ranks) == 2
    assert "ranks 0, 1 of 2 of another job below this command" in notes[0]
    assert complete(written(tmp_path, one[0], two[1])) is False
    assert complete(written(tmp_path, *one)) is True


def test_two_jobs_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="left two records at the same time"):
        paired([a_rank(0), a_rank(1), a_rank(0)])


def test_ranks_whose_steps_are_at_other_times_are_not_paired() -> None:
    with pytest.raises(ConfigError, match="at other times, or their clocks differ"):
        paired([a_rank(0), later(a_rank(1), -100)])


class Job:
    """A job that ends at a moment of a clock which waiting moves."""

    pid = 0

    def __init__(self, clock: list[float], ends_s: float) -> None:
        self._clock, self._ends_s = clock, ends_s

    def poll(self) -> int | None:
        return 0 if self._clock[0] >= self._ends_s else None

    def wait(self, seconds: float) -> int:
        self._clock[0] += min(seconds, max(self._ends_s - self._clock[0], 0.0))
        if self.poll() is None:
            raise subprocess.TimeoutExpired("job", seconds)
        return 0


@pytest.mark.parametrize("ends_s", [0.0, 500.0])
def test_a_job_that_has_ended_waits_no_longer_than_half_a_minute_for_an_answer(
    ends_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, computations = [0.0], list[int]()

    def never(task: Any, give_up: Callable[[], bool], nice: int = 0) -> None:
        computations.append(nice)
        while not give_up():
            assert clock[0] < 1000.0

    monkeypatch.setattr("dpsim.comm.clock.now", lambda: clock[0])
    monkeypatch.setattr("dpsim.launch.watched_job.now", lambda: clock[0])
    monkeypatch.setattr("dpsim.launch.workers.computed", never)
    monkeypatch.setattr(
        cli_job, "time", SimpleNamespace(sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    )
    written(tmp_path, a_rank(0), a_rank(1))
    job: Any = Job(clock, ends_s)
    text, line, logged = cli_job._answer(job, tmp_path)
    assert logged == "{}"
    assert "was not computed within 30 s" in text and json.loads(line)["summary"]["nothing_learned"] in text
    assert ends_s + 30.0 <= clock[0] < ends_s + 30.5
    assert computations == [cli_job._NICE, 0][-1 if ends_s == 0 else 0 :]  # behind the job, and then before all else
