"""Where two trainings differ first, by how much, and why: from what both did in that step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.records.reproduce import Cause, Difference, Trajectory

Array = NDArray[Any]
StepDump = Mapping[str, Array]
"""What a run's file has of one step: tensors, ``gradients/NAME``, and ``samples/WHAT`` as digests, in order."""
LOSS = "loss"
ROUNDING = 1e-5
"""Statistics that differ by more of their largest number are of other samples: rounding gives some 1e-7 of it."""


def first_difference(reference: Trajectory, other: Trajectory) -> Difference | None:
    """The first step in which any tensor or the loss differs, and the first of them; None where all are the same."""
    for step, (before, after) in enumerate(zip(reference.steps, other.steps, strict=True)):
        names = [name for name, a, b in zip(reference.tensors, before, after, strict=True) if a != b]
        if reference.losses[step] != other.losses[step]:
            names.insert(sum(name.startswith("state/") for name in names), LOSS)
        if names:
            return Difference(
                step=step + 1, tensor=names[0], tensors_differing=len(names), tensors=1 + len(reference.tensors)
            )
    return None


def explained(
    difference: Difference, losses: tuple[float, float], reference: StepDump, other: StepDump, *, again: bool = True
) -> Difference:
    """The difference with its element and its cause; ``losses`` are the reference's and the other's in that step.

    ``again``: both came to the same bits as before when they were trained once more to be looked into.
    """
    if not again:
        evidence = (
            "one of the two came to other bits when it was trained once more, in the same way: it is not determined"
        )
        return msgspec.structs.replace(difference, cause="other", evidence=evidence)
    cause, evidence = _cause(reference, other)
    found = msgspec.structs.replace(difference, cause=cause, evidence=evidence, kept=True)
    if difference.tensor == LOSS:
        return _element(found, np.array(losses[0]), np.array(losses[1]))
    return _element(found, reference[difference.tensor], other[difference.tensor])


def relative(before: float, value: float) -> float:
    """|value - before| / |before|; of zero, 1 for another number."""
    return abs(value - before) / abs(before) if before else float(value != before)


def ulps(a: Array, b: Array) -> NDArray[np.int64]:
    """How many floating-point numbers b is away from a, element by element."""
    apart: NDArray[np.int64] = np.abs(_ordered(a) - _ordered(b))
    return apart


def _ordered(values: Array) -> NDArray[np.int64]:
    """Whole numbers in the order of the floating-point ones, neighbours one apart, -0 with 0."""
    signed = np.asarray(values, order="C").view(np.dtype(f"i{values.itemsize}")).astype(np.int64)
    lowest = -(2 ** (8 * values.itemsize - 1))
    return np.where(signed < 0, lowest - signed, signed)


def _element(difference: Difference, reference: Array, other: Array) -> Difference:
    differing = reference.view(f"V{reference.itemsize}") != other.view(f"V{other.itemsize}")
    place = tuple(int(i) for i in np.unravel_index(int(differing.argmax()), reference.shape))
    value, before = float(other[place]), float(reference[place])
    apart, largest = ulps(reference, other), float(np.abs(reference).max())
    gap = float(np.abs(reference.astype(np.float64) - other).max())
    return msgspec.structs.replace(
        difference,
        element=place,
        value=value,
        reference_value=before,
        ulps=int(apart[place]),
        relative=relative(before, value),
        elements_differing=int(differing.sum()),
        elements=reference.size,
        max_ulps=int(apart.max()),
        max_relative=gap / largest if largest else float(gap > 0),
    )


def _cause(reference: StepDump, other: StepDump) -> tuple[Cause, str]:
    """What fits: followed layer by layer, sample by sample, from the samples to the gradients."""
    for name in (name for name in reference if name.startswith("samples/")):
        what = name.removeprefix("samples/")
        here, there = reference[name], other.get(name)
        if there is None or here.shape != there.shape:
            return "other", f"one of the runs has nothing of {what}"
        count = int((here != there).sum())
        if count:
            return _of_layer(what, f"{count} of {len(here)} samples", reference, other)
    names = list(_differing("gradients/", reference, other))
    if names and not any(name.startswith("samples/") for name in reference):
        return "other", (
            f"the gradients of {len(names)} tensors differ; in which layer is unknown, since this model does not show "
            "what its layers compute (dpsim.replica.ObservableReplica)"
        )
    if names:
        return "summation order", (
            f"in this step every layer made the same bits of every sample, forward and backward; the sums of the "
            f"samples' gradients differ ({len(names)} tensors)"
        )
    state = list(_differing("state/", reference, other))
    if state:
        return _of_statistics(state, "no layer's output differs", reference, other)
    if any(True for _ in _differing("", reference, other)):
        return "other", "the gradients are the same, and what the update made of them is not"
    return "summation order", "every tensor and every sample is the same; only the sum of the samples' losses differs"


def _of_layer(what: str, count: str, reference: StepDump, other: StepDump) -> tuple[Cause, str]:
    """The cause where the output of a layer is the first to differ, its input and parameters being the same."""
    if what == "input":
        return "other", f"the samples themselves differ ({count})"
    way, layer = what.split(" ", 1)
    told = f"the first to differ is the {'output' if way == 'forward' else 'backward pass'} of {layer}, in {count}"
    state = [name for name in reference if name.startswith(f"state/{layer}.")]
    if state:
        return _of_statistics(state, told, reference, other)
    if layer.startswith("dropout"):
        return "other", f"{told}, from the same input: other random numbers"
    return "shape", f"{told}, from the same input and parameters: it was computed in another shape"


def _of_statistics(names: list[str], told: str, reference: StepDump, other: StepDump) -> tuple[Cause, str]:
    """Batch norm's statistics: of other samples, or sums of the same ones in another order, by the size of the gap."""
    gap = max(float(np.abs(reference[name].astype(np.float64) - other[name]).max()) for name in names)
    apart = gap / max(float(np.abs(reference[name]).max()) for name in names)
    if apart > ROUNDING:
        return (
            "batch norm",
            f"{told}, and its statistics are {apart:.2g} of the largest apart: they are of other samples",
        )
    return "summation order", f"{told}, its statistics being {apart:.2g} of the largest apart: rounding"


def _differing(prefix: str, reference: StepDump, other: StepDump) -> Iterator[str]:
    for name, value in reference.items():
        if name.startswith(prefix) and not name.startswith("samples/") and value.tobytes() != other[name].tobytes():
            yield name
