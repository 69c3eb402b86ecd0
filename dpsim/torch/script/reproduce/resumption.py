"""What a script that resumes on another number of devices has lost of its checkpoint. Loads no torch.

The first step after resuming is held against the first one after the checkpoint in the start that wrote it: parameters,
optimizer state, schedulers and scalers have the same bits, and what is left of the epoch are the same samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PARAMETERS = "parameters that are not the checkpoint's"
OPTIMIZER = "optimizer state lost"
SCHEDULER = "scheduler state lost"
SCALER = "scaler lost"
NEVER = "samples never seen"
TWICE = "samples seen twice"
RANDOM = "random state restarted"

Record = dict[str, Any]
"""What a rank wrote (``dpsim.torch.script.probe.reproduce.resume``)."""
_CLOSE = 1e-9


@dataclass(frozen=True)
class Loss:
    """What is not as it was at the checkpoint, by its class, and how that shows."""

    kind: str
    because: str


@dataclass(frozen=True)
class Judged:
    """What the second start has lost, what differs by design, and what cannot be known."""

    losses: tuple[Loss, ...]
    designs: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def judge(first: Sequence[Record], second: Sequence[Record]) -> Judged:
    """Compare the ranks of the start that wrote a checkpoint with those of the one that resumed."""
    before, after = (
        [rank["snapshots"][name] for rank in ranks] for ranks, name in ((first, "checkpoint"), (second, "first"))
    )
    losses = [*_tensors(before, after), *_schedulers(before[0], after[0]), *_scalers(before[0], after[0])]
    designs, unknown = list[str](), list[str]()
    if not any(loss.kind in (OPTIMIZER, SCHEDULER) for loss in losses):  # the optimizer holds the rate
        losses += _rates(before[0], after[0], len(second) / len(first), designs)
    samples = _samples(first, second)
    if isinstance(samples, str):
        unknown.append(samples)
    elif samples is not None:
        losses.append(samples)
    losses += _drawn(first, second)
    return Judged(tuple(losses), tuple(designs), tuple(unknown))


def began_anew(first: Sequence[Record], second: Sequence[Record]) -> bool:
    """Whether the second start has the parameters that the first one began with, and not those of the checkpoint."""
    begun, left, resumed = (
        rank["snapshots"][name]["parameters"]
        for rank, name in ((first[0], "first"), (first[0], "checkpoint"), (second[0], "first"))
    )
    return bool(resumed == begun and begun != left)


def _tensors(before: Sequence[Record], after: Sequence[Record]) -> Iterator[Loss]:
    """Compare parameters on rank 0, from which DDP sends them, and optimizer states on every rank."""
    ours, theirs = before[0]["parameters"], after[0]["parameters"]
    if other := [name for name in ours if theirs.get(name) != ours[name]]:
        yield Loss(PARAMETERS, f"{_counted(other, len(ours))} differ from those that the checkpoint was written with")
    states = {key: value for rank in reversed(before) for key, value in rank["optimizer"].items()}
    on_all = all(rank["optimizer"].keys() == states.keys() for rank in before)
    resumed = {key for rank in after for key in rank["optimizer"]}
    for number, rank in enumerate(after):
        own = rank["optimizer"]
        absent = [key for key in states if key not in (own if on_all else resumed)]
        other = [key for key in states if key in own and own[key] != states[key]]
        where = f"on rank {number} of {len(after)} " if number else ""
        if absent:
            yield Loss(OPTIMIZER, f"{where}{_counted(absent, len(states))} are not there after resuming")
            return
        if other:
            yield Loss(OPTIMIZER, f"{where}{_counted(other, len(states))} differ from those at the checkpoint")
            return


def _counted(names: Sequence[str], total: int) -> str:
    return f"{len(names)} of {total} ({names[0]}{', ...' if len(names) > 1 else ''})"


def _schedulers(before: Record, after: Record) -> Iterator[Loss]:
    for (name, step), (_, resumed) in zip(before["schedulers"], after["schedulers"], strict=False):
        if step != resumed:
            rates = " and ".join(f"{rate:g}" for rate in after["rates"])
            yield Loss(SCHEDULER, f"{name} is at {resumed} after resuming and was at {step}: learning rate {rates}")
            return


def _rates(before: Record, after: Record, ratio: float, designs: list[str]) -> Iterator[Loss]:
    """Compare learning rates, which a script may scale with the number of devices or its root."""
    for ours, theirs in zip(before["rates"], after["rates"], strict=False):
        if math.isclose(ours, theirs, rel_tol=_CLOSE):
            continue
        said = f"the learning rate is {theirs:g} after resuming and was {ours:g}"
        if ours and any(math.isclose(theirs / ours, each, rel_tol=1e-6) for each in (ratio, math.sqrt(ratio))):
            designs.append(f"{said}, as the script scales it with the number of devices")
        else:
            yield Loss(SCHEDULER, said)
        return


def _scalers(before: Record, after: Record) -> Iterator[Loss]:
    for ours, theirs in zip(before["scalers"], after["scalers"], strict=False):
        if ours != theirs:
            names = [name for name in ours if ours[name] != theirs.get(name)]
            changed = ", ".join(f"{name} is {theirs.get(name)} and was {ours[name]}" for name in names)
            yield Loss(SCALER, f"after resuming the gradient scaler's {changed}")
            return


@dataclass(frozen=True)
class _Epoch:
    """An epoch over all ranks: what each drew, and the number of its batches before the one that is asked about."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    done: tuple[int, ...]
    drops: bool

    @property
    def left(self) -> list[int]:
        """The samples from there on."""
        return self._flat([batches[done:] for batches, done in zip(self.ranks, self.done, strict=True)])

    @property
    def all(self) -> list[int]:
        """All samples that were drawn."""
        return self._flat(self.ranks)

    @property
    def most_dropped(self) -> int:
        """Samples that may be left out at the end."""
        batch = max((len(batch) for batches in self.ranks for batch in batches), default=0)
        return len(self.ranks) * (batch + 1) if self.drops else 0

    @property
    def orders(self) -> tuple[list[int], list[int]]:
        """The order of all samples where they are dealt out to the ranks one by one, or in batches."""
        shards = [[sample for batch in batches for sample in batch] for batches in self.ranks]
        dealt = [each for row in itertools.zip_longest(*shards) for each in row if each is not None]
        by_batch = [each for row in itertools.zip_longest(*self.ranks) for batch in row for each in batch or ()]
        return dealt, by_batch

    @staticmethod
    def _flat(ranks: Sequence[Sequence[Sequence[int]]]) -> list[int]:
        return [sample for batches in ranks for batch in batches for sample in batch]


def _same_order(epoch: _Epoch, resumed: _Epoch) -> bool:
    """Whether ``resumed`` has the order of an epoch, or that of its end, which a sampler may draw alone."""
    for ours, theirs in itertools.product(epoch.orders, resumed.orders):
        begin = ours.index(theirs[0]) if theirs and theirs[0] in ours else len(ours)
        count = min(len(ours) - begin, len(theirs))
        if count > 1 and ours[begin : begin + count] == theirs[:count]:
            return True
    return False


def _epoch(ranks: Sequence[Record], step: int, *, done: int) -> _Epoch | None:
    """The epoch that a step's batches are of, with ``done`` of this step's batches as trained; None if not known."""
    drawn, numbers, drops = [], [], False
    for rank in ranks:
        batches = rank["steps"][step]["batches"] if step < len(rank["steps"]) else []
        if not batches or not all(batches):
            return None
        number, position = batches[-1] if done else batches[0]
        epoch = rank["epochs"][number]
        if not (epoch["whole"] and epoch["batches"]):
            return None
        drawn.append(tuple(map(tuple, epoch["batches"])))
        numbers.append(position + done)
        drops |= epoch["drops"]
    return _Epoch(tuple(drawn), tuple(numbers), drops)


def _epoch_number(rank: Record, step: int) -> int | None:
    batches = rank["steps"][step]["batches"]
    return batches[-1][0] if batches and batches[-1] else None


def _samples(first: Sequence[Record], second: Sequence[Record]) -> Loss | str | None:
    """Compare what is left of the epoch at the checkpoint with what the second start trains on."""
    step = first[0]["checkpoint"]
    current, resumed = _epoch(first, step - 1, done=1), _epoch(second, 0, done=0)
    following = _epoch(first, step, done=0)
    if current is None or resumed is None:
        return "which samples are trained after resuming: they come from no data loader with indices and an end"
    trained = set(current.all) - set(current.left)
    last_steps = {_epoch_number(first[0], number): number for number in range(step)}
    earlier = [each for number in last_steps.values() if (each := _epoch(first, number, done=1))]
    seen, where = set(resumed.left), f"of the {len(set(current.all))} samples of the epoch"
    restarted = any(_same_order(each, resumed) for each in earlier)
    if not current.left:
        never = set(current.all) - seen
        if len(never) > resumed.most_dropped:
            return Loss(NEVER, f"{len(never)} {where} after the checkpoint are never trained")
        if following is None or _same_order(following, resumed) or not restarted:
            return None
        return Loss(RANDOM, "the epoch after the checkpoint has the order of samples of an earlier one")
    never = set(current.left) - seen
    padding = len(resumed.all) - len(set(resumed.all))
    twice = trained & seen
    if len(never) <= resumed.most_dropped and len(twice) <= padding:
        return None
    counts = f"{where} {len(never)} are never trained after resuming, and {len(twice)} a second time"
    if _same_order(current, resumed):
        return Loss(NEVER if len(never) > len(twice) else TWICE, counts)
    if any(resumed.done) or restarted or len(set(current.all) - seen) > resumed.most_dropped:
        return Loss(RANDOM, f"{counts}: they are drawn in another order than before the checkpoint")
    rest = len(set(current.left))
    return Loss(NEVER, f"another epoch begins: {rest} {where} at the checkpoint are left out")


def _drawn(first: Sequence[Record], second: Sequence[Record]) -> Iterator[Loss]:
    """Whether steps that draw random numbers, as dropout does, draw those of earlier steps again."""
    step = first[0]["checkpoint"]
    for number, rank in enumerate(second):
        begun = rank["steps"][0]["random"]
        for other in first:
            states = [each["random"] for each in other["steps"]]
            draws = any(each["draws"] for each in other["steps"][:step])
            if draws and begun in states[:step] and begun not in states[step:]:
                at = states.index(begun) + 1
                yield Loss(
                    RANDOM, f"rank {number} draws the random numbers of step {at} again, as for dropout, after resuming"
                )
                return
