"""What a script repeats over its steps and epochs: schedules of its optimizers, and orders of samples.

Loads no torch.
"""

from __future__ import annotations

from dpsim.torch.script.reproduce.differences import REPEATED, TOO_FAST, Finding
from dpsim.torch.script.reproduce.observation import Observed

_SAME_SETTING = 1e-6
_SAMPLER = "DistributedSampler"
Batches = list[tuple[int, ...]]


def too_fast(first: Observed, other: Observed) -> Finding | None:
    """Whether a setting, such as a learning rate, is in each step what it is in the first run n times as late.

    n is the quotient of the parts into which a global batch is divided: devices, or micro-batches. Where each pass of
    the script's loop was made one of these, its scheduler is stepped in all of them by no mistake of the script.
    """
    times = 1 if other.run.wraps else other.run.parts // first.run.parts
    steps = min(len(first.settings), len(other.settings))
    reached = range(1, (steps - 1) // times + 1) if times > 1 else range(0)
    for name, start in first.settings[0].items() if reached else ():
        if not start or any(name not in each for run in (first, other) for each in run.settings[:steps]):
            continue  # of an update that is skipped nothing is noted; a rise from 0 may be to a rate that is n times it
        ours, theirs = ([each[name] for each in run.settings[:steps]] for run in (first, other))
        expected = [theirs[0] / start * each for each in ours]
        differing = [number for number in reached if not _same(theirs[number], expected[number])]
        if differing and all(_same(theirs[number], expected[times * number]) for number in reached):
            number = differing[0]
            because = (
                f"it is {theirs[number]:.4g} in place of {expected[number]:.4g}: the schedule runs {times} times as"
                f" fast as on {first.run.name}, as where the scheduler is stepped for each rank or micro-batch"
            )
            return Finding(other.run.name, number + 1, name, TOO_FAST, because)
    return None


def changed_settings(first: Observed, other: Observed) -> list[str]:
    """Return what settings of the optimizers are in another run, at the first step in which they differ."""
    changed: dict[str, str] = {}
    for number, (before, after) in enumerate(zip(first.settings, other.settings, strict=False)):
        for name in before if after else ():  # none are noted of an update that is skipped
            if name not in changed and before[name] != after.get(name):
                since = f" in step {number + 1}" if number else ""
                changed[name] = f"{name} is {after.get(name, 0.0):g} in place of {before[name]:g}{since}"
    return list(changed.values())


def same_order(first: Observed, other: Observed) -> Finding | None:
    """Whether a shuffling sampler has one order for all epochs of a run, where the first run has another for each."""
    before, after = first.epochs, other.epochs
    if len(before) < 2 or _are_alike(before) or not repeats_its_order(other):
        return None
    because = (
        f"its sampler has one order for all epochs, and on {first.run.name} each epoch has another: nothing calls"
        " set_epoch of the DistributedSampler"
    )
    return Finding(other.run.name, len(after[0]) + 1, "the order of the samples", REPEATED, because)


def repeats_its_order(run: Observed) -> bool:
    """Whether a DistributedSampler that shuffles has one order for all epochs of a run, of which there are two."""
    batches = run.epochs
    if len(batches) < 2 or not any(each.sampler == _SAMPLER for each in run.reports[0].loaders):
        return False
    order = [index for batch in batches[0] for index in batch]
    return order != sorted(order) and _are_alike(batches)


def _are_alike(epochs: list[Batches]) -> bool:
    """Whether all later epochs begin with the batches of the first one."""
    return all(batches == epochs[0][: len(batches)] for batches in epochs[1:])


def _same(value: float, other: float) -> bool:
    return abs(value - other) <= _SAME_SETTING * max(abs(value), abs(other))
