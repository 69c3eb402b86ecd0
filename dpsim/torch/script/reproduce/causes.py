"""The first step and tensor in which a run differs from the first one by more than rounding, and why.

Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.torch.script.probe.reproduce.report import RankStep
from dpsim.torch.script.reproduce.differences import (
    APART,
    BUFFERS,
    MISSING,
    NOT_A_NUMBER,
    OTHER_SAMPLES,
    OVERWRITTEN,
    OWN_NORM,
    PADDED,
    RANDOM,
    REDUCED_NARROW,
    REPEATED,
    SAMPLES,
    SCALE,
    SEEDS,
    UNKNOWN,
    Finding,
    Step,
    sampler_line,
)
from dpsim.torch.script.reproduce.observation import Observed, hashes_differ
from dpsim.torch.script.reproduce.reasons import cause_of_gradient, drawn, own_buffers
from dpsim.torch.script.reproduce.repetitions import too_fast
from dpsim.torch.script.reproduce.rounding import (
    ALLOWANCE,
    EPSILON,
    LOSS,
    NARROW_EPSILON,
    Rounding,
    mean_loss,
    quantities,
    sent_epsilon,
    size,
)
from dpsim.torch.script.reproduce.samples import Samples, compared, overlap
from dpsim.torch.script.reproduce.sixteen_bits import kept, overflow
from dpsim.torch.script.reproduce.weights import SAME_WEIGHT, Compared

_LEAST_NORMAL_HALF = 2.0**-14
"""Below it numbers of float16 are at equal distances."""


def first_finding(first: Observed, other: Observed, rounding: Rounding) -> Finding | None:
    """Return the first difference that rounding does not explain; None without one."""
    if found := _shards(first, other):
        return found
    for number in range(min(first.steps, other.steps)):
        step = Step(first, other, rounding, number)
        for check in _checks(step):
            if finding := check(step):
                return finding
    return too_fast(first, other)


def finding_among_ranks(first: Observed, other: Observed, rounding: Rounding) -> Finding | None:
    """Return the first mistake that the ranks of a run show by themselves, where its samples are not the first run's.

    They begin with other values, update by other gradients, or get other sums than of what they sent.
    """
    for number in range(min(first.steps, other.steps)):
        step = Step(first, other, rounding, number)
        for check in _AMONG_RANKS if all(check in CHECKS for check in _checks(step)) else ():
            if finding := check(step):
                return finding
    return too_fast(first, other)


def _checks(step: Step) -> Sequence[Callable[[Step], Finding | None]]:
    """What can be checked in a step: no values where they are not numbers in both runs."""
    if any(rank.bypassed for rank in (*step.ours, *step.theirs)):
        return (_ranks_agree,)
    if any(rank.skipped for rank in (*step.ours, *step.theirs)):
        return (overflow,)
    return () if is_no_number(step.ours) and is_no_number(step.theirs) else CHECKS


def is_no_number(ranks: Sequence[RankStep]) -> bool:
    """Whether the loss of a rank, or a reduced gradient, is not finite."""
    gradients = (values for rank in ranks for values in rank.reduced.values())
    return not (all(math.isfinite(rank.loss) for rank in ranks) and all(np.isfinite(each).all() for each in gradients))


def _shards(first: Observed, other: Observed) -> Finding | None:
    """Whether the ranks' samplers divide an epoch, whatever ranks share within a step."""
    found = None if other.run.same_samples else overlap(first, other)
    if found is None:
        return None
    because = (
        f"each rank draws its shard by a seed of its own: of {found.size} samples {found.repeated} train more than"
        f" once in an epoch, and {found.never} never"
    )
    return Finding(other.run.name, 1, f"{SAMPLES} of the first epoch", SEEDS, because, line=sampler_line(other))


def _begun(step: Step) -> Finding | None:
    """Whether ranks began a step with other parameters than each other."""
    differ = hashes_differ(tuple(rank.begun for rank in step.theirs))
    if not differ:
        return None
    if step.number == 0:
        return step.found(
            differ[-1], SEEDS, "ranks begin with different values of it: they are drawn by each rank's own seed"
        )
    return step.found(differ[-1], APART, "ranks hold different values of it after their updates")


def _buffers_seen(step: Step) -> Finding | None:
    differ = hashes_differ(tuple(rank.buffers_seen for rank in step.theirs))
    if not differ:
        return None
    return step.found(
        differ[0],
        BUFFERS,
        "the forward passes of the ranks read different values of this buffer: nothing synchronises it",
    )


def _samples(step: Step) -> Finding | None:
    found, ranks = compared(step.first, step.other, step.number), step.other.run.devices
    if step.other.run.same_samples and found is not Samples.SAME:
        found = Samples.OTHER
    tensor = SAMPLES
    if found is Samples.SAME_ON_ALL_RANKS:
        return step.found(tensor, REPEATED, f"all {ranks} ranks train on the same samples: no sampler divides them")
    if found is Samples.OVERLAP:
        return step.found(
            tensor,
            SEEDS,
            "each rank draws from all samples by a seed of its own, so that some train twice and some never",
        )
    if found is Samples.PADDED:
        return step.found(
            tensor, PADDED, "the sampler repeats samples to give all ranks the same number, and they count twice"
        )
    if found is Samples.DROPPED:
        return step.found(tensor, OTHER_SAMPLES, "the sampler leaves samples out to give all ranks the same number")
    if found is Samples.OTHER:
        return step.found(tensor, OTHER_SAMPLES, "they are in another order than in the first run")
    if found is Samples.UNKNOWN:
        return step.found(tensor, OTHER_SAMPLES, drawn(step))
    return None


def _numbers(step: Step) -> Finding | None:
    """Whether what is a number in one run is none in the other."""
    ours, theirs = is_no_number(step.ours), is_no_number(step.theirs)
    if ours == theirs:
        return None
    ranks = step.theirs if theirs else step.ours
    losses = ", ".join(f"{rank.loss:.3g}" for rank in ranks)
    where, other = (step.other.run.name, step.first.run.name) if theirs else (step.first.run.name, step.other.run.name)
    what = f"the ranks' losses are {losses}" if len(ranks) > 1 else f"the loss is {losses}"
    return step.found(
        LOSS,
        NOT_A_NUMBER,
        f"{what} on {where}, and the loss and gradients are numbers on {other}: a mean over no samples is not a number",
    )


def _ranks_agree(step: Step) -> Finding | None:
    """Whether the optimizers of all ranks get the same gradients."""
    ranks = step.theirs
    differ = hashes_differ(tuple(rank.final_hashes for rank in ranks))
    ordered = [name for name in step.names if name in differ]
    for name in ordered:
        without = [number for number, rank in enumerate(ranks) if name not in rank.final]
        if without:
            return step.found(name, MISSING, f"rank {without[0]} has no gradient for it, and others have one")
        own = [rank.local[name] if name in rank.local else rank.final[name] for rank in ranks]
        epsilon = step.epsilon(name)
        if all(_parallel(mine, rank.final[name], epsilon) for mine, rank in zip(own, ranks, strict=True)):
            reason = "its gradient is not reduced: each rank updates it with that of its own samples"
            if ranks[0].bypassed:
                reason += ", for the loss is computed by parts of the model and not by what DDP returned"
            return step.found(name, MISSING, reason)
        if not hashes_differ(tuple(_keys(rank, name) for rank in ranks)):
            return step.found(name, APART, "ranks change its gradient differently after it was reduced")
        return step.found(name, OVERWRITTEN, "ranks get different sums of its gradient")
    return None


def _keys(rank: RankStep, name: str) -> dict[str, int]:
    values = rank.reduced.get(name)
    return {name: hash(None if values is None else values.tobytes())}


def _parallel(local: NDArray[np.floating], final: NDArray[np.floating], epsilon: float) -> bool:
    """Whether one array is the other times a number, at this distance of numbers."""
    scale = float(np.dot(local, final)) / (float(np.dot(local, local)) or 1.0)
    return size(final - scale * local) <= max(1e-5, epsilon) * size(final)


def _sums(step: Step) -> Finding | None:
    """Whether what ranks got is the mean of what they sent."""
    ranks = step.theirs
    if sent_epsilon(step.other) == 1.0 or len(ranks) == 1:
        return None
    # FSDP rounds the mean of each micro-batch before it adds them, and these may cancel each other.
    reduced_parts = step.other.reports[0].wrapper == "FSDP" and any(len(rank.micro_batches) > 1 for rank in ranks)
    for name in step.names:
        got, sent = ranks[0].reduced.get(name), [rank.local.get(name) for rank in ranks]
        by_script = got is None
        got = ranks[0].final.get(name) if by_script else got
        present = np.array([each for each in sent if each is not None], dtype=np.float64)
        if got is None or not present.size:
            continue
        mean = present.sum(axis=0) / len(ranks)
        epsilon = max(sent_epsilon(step.other), step.epsilon(name))
        bound = _bound(present, epsilon)
        if np.all(np.abs(got - mean) <= bound):
            continue
        moved, own = size(got - mean), size(mean) or 1.0
        allowed = step.rounding.explains("reduced", name, step.number, mean)
        if reduced_parts and moved <= ALLOWANCE * allowed:
            continue
        wrong = np.count_nonzero(np.abs(got - mean) > bound)
        kind, because = OVERWRITTEN, f"{wrong} of {got.size} numbers that ranks got are not the mean of what they sent"
        factor = float(np.dot(got, mean)) / (float(np.dot(mean, mean)) or 1.0)
        if size(got - factor * mean) <= max(1e-5, step.epsilon(name)) * size(got):
            kind, because = SCALE, f"what ranks got is {factor:.4g} times the mean of what they sent"
        elif np.all(np.abs(got - mean) <= _bound(present, max(NARROW_EPSILON.values()))):
            because = (
                "what ranks got is the mean of what they sent but for rounding to 16 bits, where the gradient has 32"
                f" and {_hook_or_policy(step)} says so"
            )
            kind = REDUCED_NARROW
        if by_script and kind != REDUCED_NARROW:
            continue
        return step.found(name, kind, because, difference=moved / own, rounding=allowed / own)
    return None


def _hook_or_policy(step: Step) -> str:
    hook = step.other.reports[0].hook
    return f"nothing but the communication hook {hook}" if hook else "no hook or reduce_dtype of a policy"


def _bound(sent: NDArray[np.floating], epsilon: float) -> NDArray[np.floating]:
    """How far a mean over ranks may be off, of numbers at this distance: the first extent is the ranks'."""
    least = _LEAST_NORMAL_HALF if epsilon > EPSILON else 1e-30
    bound: NDArray[np.floating] = (len(sent) + 2) * epsilon * (np.abs(sent).sum(axis=0) / len(sent) + least)
    return bound


def _norms(step: Step) -> Finding | None:
    """Whether ranks clip gradients that are not reduced yet."""
    ranks = step.theirs
    for name in step.names:
        factors = [rank.clipped.get(name, 1.0) for rank in ranks]
        if name not in ranks[0].reduced and np.ptp(factors) > SAME_WEIGHT:
            listed = " and ".join(f"{each:.3g}" for each in factors)
            because = f"ranks scale it by {listed} before it is reduced: each clips the norm of its own gradients"
            return step.found(name, OWN_NORM, because)
    return None


def _gradients(step: Step) -> Finding | None:
    """Whether the reduced gradients are those of the first run, or what the script has made of them is."""
    gradients = Compared.of(step)
    if _prepared_alike(step):
        return None
    for name in step.names:
        mine, their = gradients.ours.get(name), gradients.theirs.get(name)
        if mine is None and their is None:
            continue
        if mine is None or their is None:
            return step.found(name, MISSING, f"it has no gradient {_where(step, first=mine is None)}")
        if gradients.differs(name):
            own = size(mine) or 1.0
            kind, because = cause_of_gradient(step, name, gradients)
            difference = size(mine - their) / own
            return step.found(name, kind, because, difference=difference, rounding=gradients.allowed[name] / own)
    return None


def _prepared_alike(step: Step) -> bool:
    """Whether all that optimizers get is the first run's but for clipping.

    A script may divide by the global number of tokens, and reduce gradients, after its backward.
    """
    ours, theirs = quantities(step.ours, "prepared"), quantities(step.theirs, "prepared")
    return (
        bool(ours)
        and ours.keys() == theirs.keys()
        and all(
            size(mine - theirs[name]) <= ALLOWANCE * step.rounding.explains("prepared", name, step.number, mine)
            for name, mine in ours.items()
        )
    )


def _where(step: Step, *, first: bool) -> str:
    return f"on {(step.first if first else step.other).run.name}"


def _loss(step: Step) -> Finding | None:
    """Whether ranks add their losses, where all gradients are right.

    Other losses with these gradients are no mistake: a script may scale either by the number of ranks or of tokens.
    """
    mine, their = mean_loss(step.ours), mean_loss(step.theirs)
    allowed = step.rounding.explains("loss", LOSS, step.number, np.array([mine]))
    if abs(mine - their) <= ALLOWANCE * allowed:
        return None
    is_sum = abs(their - len(step.theirs) * mine) <= SAME_WEIGHT * abs(their)
    if any(rank.draws for rank in (*step.ours, *step.theirs)):
        kind, because = RANDOM, "the script draws random numbers in its step that are not one stream a sample"
    elif is_sum and any(rank.adds for rank in step.theirs):
        kind = SCALE
        because = "the script adds the ranks' losses before backward, which their gradients do not notice"
    else:
        return None
    own = abs(mine) or 1.0
    return step.found(LOSS, kind, because, difference=abs(mine - their) / own, rounding=allowed / own)


def _final(step: Step) -> Finding | None:
    """Whether the optimizer gets what the first run's got: clipped, unscaled and so on."""
    ours, theirs = quantities(step.ours, "final"), quantities(step.theirs, "final")
    for name in step.names:
        mine, their = ours.get(name), theirs.get(name)
        if mine is None or their is None:
            if (mine is None) != (their is None):
                return step.found(name, MISSING, f"the optimizer gets no gradient {_where(step, first=mine is None)}")
            continue
        moved, allowed = size(mine - their), step.rounding.explains("final", name, step.number, mine)
        if moved > ALLOWANCE * allowed:
            own, factor = size(mine) or 1.0, float(np.dot(mine, their)) / (float(np.dot(mine, mine)) or 1.0)
            kind, because = UNKNOWN, "the script changes the gradients differently after they were reduced"
            if size(their - factor * mine) <= 1e-4 * size(their):
                kind, because = SCALE, f"the script scales gradients by {factor:.4g} of what it does in the first run"
            elif factors := _factors_of_parts(step):
                listed = " and ".join(f"{each:.3g}" for each in factors)
                kind, because = (
                    OWN_NORM,
                    (
                        f"the script scales the ranks' shards by {listed} of what it does in the first run, where all"
                        " should be scaled by one number, such as that of the norm of all shards"
                    ),
                )
            return step.found(name, kind, because, difference=moved / own, rounding=allowed / own)
    return None


def _factors_of_parts(step: Step) -> list[float]:
    """The factors by which parts of the final gradients, at most one a rank, are scaled; empty where none show that."""
    ours, theirs = quantities(step.ours, "final"), quantities(step.theirs, "final")
    for name in sorted(ours.keys() & theirs.keys(), key=lambda each: -ours[each].size):
        clear = np.abs(ours[name]) > 0.1 * size(ours[name])
        ratios = np.sort(theirs[name][clear] / ours[name][clear])
        parts = np.split(ratios, np.flatnonzero(np.diff(ratios) > SAME_WEIGHT * np.abs(ratios[1:])) + 1)
        if 1 < len(parts) <= len(step.theirs) and len(ratios) > 2 * len(step.theirs):
            return [float(part.mean()) for part in parts]
    return []


CHECKS: Sequence[Callable[[Step], Finding | None]] = (
    _begun,
    _buffers_seen,
    _samples,
    _numbers,
    _ranks_agree,
    _sums,
    _norms,
    _gradients,
    _loss,
    _final,
    own_buffers,
    kept,
)
_AMONG_RANKS: Sequence[Callable[[Step], Finding | None]] = (_begun, _buffers_seen, _ranks_agree, _sums, _norms)
