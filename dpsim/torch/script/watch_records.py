"""Which records of a watched job belong together, and what is wrong with the others. Loads no torch.

A job may restart its ranks, run twice below one command, or be killed while it writes: what cannot be used or paired is
told in a sentence, and never mixed with the rest.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError, DpsimError, FileFormatError
from dpsim.torch.script.watched import WatchedRank

_LONGEST_S = 1e7
"""No step lasts longer, and no clock of a machine differs from another moment of its own by more."""
_TOLERANCE, _TOLERANCE_S = 1.1, 2e-3
"""What the parts of a step may be of it: a clock is read before and after each."""
_OVERLAPPING = 0.9
"""The share of the steps of two ranks of one job that overlap in time, at least: all end with a common allreduce."""
_MOST_DIGITS = 18
_DURATIONS = ("forward_s", "backward_s", "update_s", "input_s")
_DELAYS = ("delayed_s", "computing_delayed_s", "input_delayed_s")


def read(paths: Iterable[Path]) -> tuple[list[WatchedRank], list[str]]:
    """Return the records that can be used, and a sentence about each other one."""
    records, notes = [], []
    for path in sorted(paths):
        try:
            records.append(_read(path))
        except DpsimError as error:
            notes.append(f"the record {path.name} is not used: {error.given}")
    return records, notes


def _read(path: Path) -> WatchedRank:
    record = codec.decode(codec.read_raw(path, "record"), WatchedRank, "record")
    if problem := _problem(record):
        raise FileFormatError(problem)
    return record


def _problem(record: WatchedRank) -> str:
    """What is wrong with the numbers of a record; empty where nothing is."""
    positions = range(len(record.parameters))
    if not (0 <= record.rank < record.ranks and 0 < record.ranks_here <= record.ranks):
        return f"it is of rank {record.rank} of {record.ranks}, with {record.ranks_here} on this machine"
    if min(record.local_batch, record.accumulate, record.cores, record.threads) < 1:
        return "its batch, micro-batches, cores or threads are below 1"
    if not re.match(r"\d{1,4}\.\d{1,4}(\D|$)", record.torch):
        return f"its PyTorch has the version {record.torch[:20]!r}"
    rebuilt = [bucket.split() for bucket in record.rebuilt.split(",") if record.rebuilt]
    sizes = [size.strip() for size in record.initial_bucket_bytes.split(",") if size.strip()]
    words = [*itertools.chain(*rebuilt), *sizes]
    if not all(rebuilt) or not all(word.isdecimal() and len(word) <= _MOST_DIGITS for word in words):
        return "its buckets are no numbers"
    if rebuilt and sorted(map(int, itertools.chain(*rebuilt))) != [*positions]:
        return "its buckets have not each of its parameters once"
    if any(not 0 < each.size_bytes < 2**63 for each in record.parameters):
        return "its parameters have no sizes"
    of_steps = (record.last_backward_s, record.loss_s, record.ready_ns)
    if any(len(each) != len(record.steps) for each in of_steps) or any(
        len(moments) != len(positions) for moments in record.ready_ns
    ):
        return "its steps have not as many times each"
    return _wrong_times(record)


def _wrong_times(record: WatchedRank) -> str:
    """What is wrong with the times of a record; empty where nothing is."""
    numbers = [value for step in record.steps for value in msgspec.structs.astuple(step) if isinstance(value, float)]
    numbers += [*record.last_backward_s, *record.loss_s, record.own_s]
    numbers += [moment * 1e-9 for moments in record.ready_ns for moment in moments]
    waited_s = [seconds for step in record.steps for seconds in (*step.gather_s, *step.reduce_scatter_s)]
    numbers += waited_s
    if not all(math.isfinite(number) and abs(number) < _LONGEST_S for number in numbers):
        return "a time in it is no number of seconds that a job can take"
    moments = [moment for step in record.steps for moment in (step.began_s, step.computed_s, step.ended_s)]
    if any(later < before for before, later in itertools.pairwise(moments)):
        return "its clock has jumped back"
    durations_s = [getattr(step, name) or 0.0 for step in record.steps for name in (*_DURATIONS, *_DELAYS)]
    if min((0.0, *durations_s, *waited_s)) < 0:
        return "a time in it is below 0"
    if any(step.ended_s <= step.began_s for step in record.steps):
        return "a step in it takes no time"
    if record.steps:
        parts = statistics.median(sum(getattr(step, name) for name in _DURATIONS) for step in record.steps)
        delayed = statistics.median(step.delayed_s for step in record.steps)
        whole = statistics.median(step.ended_s - step.began_s for step in record.steps)
        if max(parts, delayed) > whole * _TOLERANCE + _TOLERANCE_S:
            return "the parts of its steps are longer than the steps"
    return ""


def _run(record: WatchedRank) -> tuple[str, int, str]:
    return record.run, record.ranks, record.script


def runs(records: Sequence[WatchedRank]) -> list[list[WatchedRank]]:
    """Return the records in groups that belong together, by run, world size and script, the fullest and latest first.

    Of two records of one rank in a group, the first is of another job, and stands in a group of its own.
    """
    groups: list[list[WatchedRank]] = []
    for record in sorted(records, key=_ended_s):
        group = next(
            (
                group
                for group in reversed(groups)
                if _run(group[0]) == _run(record) and record.rank not in [each.rank for each in group]
            ),
            None,
        )
        if group is None:
            groups.append([record])
        else:
            group.append(record)
    return sorted(groups, key=lambda group: (len(group), _ended_s(group[-1])), reverse=True)


def _ended_s(record: WatchedRank) -> float:
    return record.steps[-1].ended_s if record.steps else 0.0


def complete(paths: Iterable[Path]) -> bool:
    """Whether all ranks of a job on this machine have left a record that can be used."""
    return any(len(group) >= group[0].ranks_here for group in runs(read(paths)[0]))


def paired(records: Sequence[WatchedRank]) -> tuple[list[WatchedRank], list[str]]:
    """Return the records of one run, and a sentence about each other one.

    Raises ``ConfigError`` where steps of the ranks of a run do not overlap in time, and where two jobs wrote alike.
    """
    first, *others = runs(records)
    notes = []
    for group in others:
        what = "another job below this command" if _ports(group[0]) != _ports(first[0]) else "another attempt"
        if _run(group[0]) == _run(first[0]):
            what = "another job that cannot be told from it"
            if any(_overlap(mine, other) for mine in first for other in group):
                raise ConfigError(
                    f"rank {group[0].rank} of {group[0].ranks} of {group[0].script or 'a job'} left two records at the"
                    " same time: two jobs run below this command, and their ranks cannot be told apart",
                    allowed="one job",
                    remedy="watch each job by itself",
                )
        ranks = ", ".join(str(each.rank) for each in sorted(group, key=lambda each: each.rank))
        notes.append(f"ranks {ranks} of {group[0].ranks} of {what} ({group[0].script}) were seen too, and are left out")
    for record in first[1:]:
        if not _overlap(first[0], record):
            raise ConfigError(
                f"the steps of ranks {first[0].rank} and {record.rank} were at other times, or their clocks differ",
                allowed="records of ranks that train together",
                remedy="watch the job again",
            )
    return first, notes


def _ports(record: WatchedRank) -> str:
    """The part of a run that the attempts of a job share."""
    return record.run.partition(" attempt ")[0]


def _overlap(one: WatchedRank, other: WatchedRank) -> bool:
    """Whether most steps of the two, taken by their numbers, overlap in time; True where there are none."""
    pairs = list(zip(one.steps, other.steps, strict=False))
    overlapping = [a.began_s < b.ended_s and b.began_s < a.ended_s for a, b in pairs]
    return not pairs or statistics.fmean(overlapping) >= _OVERLAPPING
