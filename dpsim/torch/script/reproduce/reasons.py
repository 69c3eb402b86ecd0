"""Why a gradient is not the first run's, though it is the mean of the ranks' own: the class and the reason.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpsim.torch.script.reproduce.differences import (
    BUFFERS,
    CHANGED,
    CLEARED,
    MISSING,
    OTHER_SAMPLES,
    OWN_LOSS,
    RANDOM,
    SCALE,
    SEEDS,
    SHARES,
    UNKNOWN,
    Finding,
    Step,
)
from dpsim.torch.script.reproduce.observation import hashes_differ
from dpsim.torch.script.reproduce.rounding import ALLOWANCE, EPSILON, size
from dpsim.torch.script.reproduce.samples import told_apart
from dpsim.torch.script.reproduce.weights import (
    SAME_WEIGHT,
    Compared,
    are_equal,
    parts_of_one,
    weights_of_a_term,
    weights_of_ranks,
)


def cause_of_gradient(step: Step, name: str, gradients: Compared) -> tuple[str, str]:
    """The class and the reason of a gradient that is not the first run's, though it is the mean of the ranks'."""
    ranks = step.theirs
    without = [number for number, rank in enumerate(ranks) if name not in rank.local]
    if not told_apart(step.first, step.other, step.number):
        return OTHER_SAMPLES, drawn(step)
    if changed := [rank.changed[name] for rank in ranks if name in rank.changed]:
        return _between_micro_batches(min(changed))
    weights = weights_of_ranks(step, gradients) or weights_of_ranks(step, gradients, of_micro_batches=True)
    if weights and (cause := _of_weights(step, name, weights, gradients)):
        return cause
    if without and len(without) < len(ranks):
        return MISSING, f"rank {without[0]} has no gradient for it, and others have one"
    if any(rank.draws for rank in (*ranks, *step.ours)):
        return RANDOM, "the script draws random numbers in its step that are not one stream a sample"
    if finding := own_buffers(step):
        return BUFFERS, f"{finding.because}: {finding.tensor}"
    if differ := hashes_differ(tuple(rank.outside for rank in ranks)):
        return _outside(step, differ[0])
    if any(rank.gathers for rank in ranks):
        return MISSING, (
            "the loss is of what all_gather brings from other ranks, and their part of the gradient is lost:"
            " torch.distributed.nn.functional.all_gather carries it"
        )
    term, weights = weights_of_a_term(step, gradients)
    if weights and (cause := _of_weights(step, term, weights, gradients, what=f"the gradient of {term}")):
        kind, because = cause
        return kind, f"{because} (which is of a term of the loss, and other terms have other divisors)"
    reason = "the ranks' gradients are of the same samples and the same parameters, and no mean of them is right"
    if step.number:
        return UNKNOWN, reason
    return OWN_LOSS, (
        f"{reason}: the loss has a term of a rank's samples together (negatives, an auxiliary loss, statistics), or one"
        " that is divided by another number than the others"
    )


def _outside(step: Step, name: str) -> tuple[str, str]:
    """The class and the reason where ranks hold different values of a tensor of another module."""
    whose = f"ranks hold different values of {name}, outside of {step.other.reports[0].wrapper}"
    if hashes_differ(tuple(rank.outside for rank in step.other.step(0))):
        return SEEDS, whose
    return BUFFERS, f"{whose}: each updates it from its own samples"


def _of_weights(
    step: Step, name: str, weights: Sequence[float], gradients: Compared, *, what: str = ""
) -> tuple[str, str] | None:
    """The class and the reason by the weights with which the ranks' gradients add up to the first run's.

    They are those of all gradients, or of ``what``. None where they are equal, and no number scales the gradient.
    """
    ranks, count = step.theirs, len(weights)
    if are_equal(weights):
        mine, their = gradients.ours[name].astype(np.float64), gradients.theirs[name].astype(np.float64)
        factor = float(np.dot(mine, their) / (np.dot(mine, mine) or 1.0))
        more = step.other.run.accumulate / step.first.run.accumulate
        left = size(their - factor * mine)
        if abs(factor - 1) < SAME_WEIGHT or left > ALLOWANCE * max(factor, 1.0) * gradients.allowed[name]:
            return None
        scaled = "the loss or the gradient is scaled by another number than the global batch"
        if more != 1 and abs(factor / more - 1) < SAME_WEIGHT:
            scaled = "the losses of a step's micro-batches are not divided by their number"
        if any(rank.gathers for rank in ranks):
            scaled += ", as where all_gather brings features of other ranks without their gradients"
        return SCALE, f"{what or 'every gradient'} is {factor:.6g} times that on {step.first.run.name}: {scaled}"
    if count > len(ranks):
        shares = ", ".join(f"{weight / sum(weights):.3g}" for weight in weights)
        return SHARES, (
            "the means of the micro-batches are of unequal shares: they belong into the mean with weights"
            f" {shares}, and the script takes the same part of each"
        )
    shares = ", ".join(f"{weight:g}" for weight in parts_of_one(weights))
    samples = [rank.samples for rank in ranks]
    unequal = f" ({', '.join(map(str, samples))} samples)" if len(set(samples)) > 1 else ""
    return SHARES, (
        f"the ranks' means are of unequal shares{unequal}: they belong into the mean{what and f' of {what}'} with"
        f" weights {shares}, and {step.other.reports[0].wrapper} takes 1/{count} of each"
    )


def _between_micro_batches(factor: float) -> tuple[str, str]:
    """The class and the reason where the script changes gradients between the micro-batches of a step."""
    if factor == 0.0:
        return CLEARED, (
            "the script clears the gradients between the micro-batches of a step: the last ones alone are in the update"
        )
    return CHANGED, (
        f"the script multiplies the gradients by {factor:.3g} between the micro-batches of a step, as clipping in each"
        " of them does"
    )


def own_buffers(step: Step) -> Finding | None:
    """Whether buffers that are no running statistics of batch norm come from all samples."""
    norms = tuple(f"{name}." if name else "" for name in step.other.reports[0].local_norms)
    ours, ranks = step.ours[0].buffers, step.theirs
    for name, mine in ours.items():
        their = ranks[0].buffers.get(name)
        if (norms and name.startswith(norms)) or their is None or mine.shape != their.shape:
            continue
        moved, own = size(mine - their), size(mine)
        if moved > ALLOWANCE * 4 * EPSILON * max(own, size(their)) + 1e-12:
            apart = any(not np.array_equal(their, rank.buffers[name]) for rank in ranks[1:] if name in rank.buffers)
            if apart:
                because = "each rank updates this buffer from its own samples, and nothing adds these up"
                return step.found(name, BUFFERS, because, difference=moved / (own or 1.0))
    return None


def drawn(step: Step) -> str:
    """What differs where the script draws its batches itself, or they are known by values that repeat."""
    if not told_apart(step.first, step.other, step.number):
        return "samples that are alike in value, and come from no data loader, cannot be told apart"
    ours, theirs = (sum(rank.samples for rank in ranks) for ranks in (step.ours, step.theirs))
    counts = f": {ours} a step on {step.first.run.name}, {theirs} on {step.other.run.name}" if ours != theirs else ""
    return f"the script draws other samples on another number of devices{counts}"
