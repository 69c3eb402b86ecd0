"""Where two trainings first differ, by how much, and why: derived from what both computed in that step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.records.reproduce import Cause, Difference, Trajectory

Array = NDArray[Any]
StepDump = Mapping[str, Array]
"""Everything that a run computed in one step.

Keys are the names of the tensors, ``gradients/NAME``, and ``samples/OUTPUT`` with one digest for each sample, where
OUTPUT is ``input``, ``forward LAYER`` or ``input_gradient LAYER``, in the order of computation.
"""
LOSS = "loss"
ROUNDING = 1e-5
"""Statistics that differ by more than this (relative to the largest) are of other samples; rounding causes 1e-7."""


def first_difference(reference: Trajectory, other: Trajectory) -> Difference | None:
    """Return the first step, and in it the first tensor, in which two trajectories differ; ``None`` if they do not."""
    for step, (expected, actual) in enumerate(zip(reference.steps, other.steps, strict=True)):
        names = [name for name, a, b in zip(reference.tensors, expected, actual, strict=True) if a != b]
        if reference.losses[step] != other.losses[step]:
            names.insert(sum(name.startswith("state/") for name in names), LOSS)
        if names:
            return Difference(
                step=step + 1, tensor=names[0], tensors_differing=len(names), tensors=1 + len(reference.tensors)
            )
    return None


def explained(
    difference: Difference,
    losses: tuple[float, float],
    reference: StepDump,
    other: StepDump,
    *,
    repeatable: bool = True,
) -> Difference:
    """Return the difference with its first element and its cause.

    ``losses`` are the reference's and the other run's in that step. ``repeatable``: when both were trained again to
    make the dumps, both ended with the same bits as before.
    """
    if not repeatable:
        evidence = "one of the two runs had other bits when it was trained again with the same settings"
        return msgspec.structs.replace(difference, cause="other", evidence=evidence)
    cause, evidence = _cause(reference, other)
    with_cause = msgspec.structs.replace(difference, cause=cause, evidence=evidence, values_known=True)
    if difference.tensor == LOSS:
        return _with_element(with_cause, np.array(losses[0]), np.array(losses[1]))
    return _with_element(with_cause, reference[difference.tensor], other[difference.tensor])


def relative(expected: float, actual: float) -> float:
    """Return |actual - expected| / |expected|; where ``expected`` is zero, 1 for any other number."""
    return abs(actual - expected) / abs(expected) if expected else float(actual != expected)


def ulps(a: Array, b: Array) -> NDArray[np.int64]:
    """Return how many floating-point numbers a and b are apart, element by element."""
    distance: NDArray[np.int64] = np.abs(_ordinals(a) - _ordinals(b))
    return distance


def _ordinals(values: Array) -> NDArray[np.int64]:
    """Number the floating-point values in ascending order, so that neighbours are 1 apart; -0 and 0 are both 0."""
    signed = np.asarray(values, order="C").view(np.dtype(f"i{values.itemsize}")).astype(np.int64)
    lowest = -(2 ** (8 * values.itemsize - 1))
    return np.where(signed < 0, lowest - signed, signed)


def _with_element(difference: Difference, reference: Array, other: Array) -> Difference:
    """Return the difference with the first element that differs, and by how much this tensor differs."""
    differing = reference.view(f"V{reference.itemsize}") != other.view(f"V{other.itemsize}")
    element = tuple(int(i) for i in np.unravel_index(int(differing.argmax()), reference.shape))
    value, reference_value = float(other[element]), float(reference[element])
    distances, largest = ulps(reference, other), float(np.abs(reference).max())
    gap = float(np.abs(reference.astype(np.float64) - other).max())
    return msgspec.structs.replace(
        difference,
        element=element,
        value=value,
        reference_value=reference_value,
        ulps=int(distances[element]),
        relative=relative(reference_value, value),
        elements_differing=int(differing.sum()),
        elements=reference.size,
        max_ulps=int(distances.max()),
        max_relative=gap / largest if largest else float(gap > 0),
    )


def _cause(reference: StepDump, other: StepDump) -> tuple[Cause, str]:
    """Return the cause and its evidence, from the first output that differs in the order of computation.

    That order is: the samples, the output and input gradient of every layer, the gradients, the statistics, the update.
    """
    for name in (name for name in reference if name.startswith("samples/")):
        output = name.removeprefix("samples/")
        expected, actual = reference[name], other.get(name)
        if actual is None or expected.shape != actual.shape:
            return "other", f"one of the runs did not compute {output}"
        count = int((expected != actual).sum())
        if count:
            return _cause_in_layer(output, f"{count} of {len(expected)} samples", reference, other)
    gradients = list(_differing("gradients/", reference, other))
    if gradients and not any(name.startswith("samples/") for name in reference):
        return "other", (
            f"the gradients of {len(gradients)} tensors differ; in which layer is unknown, since this model does not "
            "show what its layers compute (dpsim.replica.ObservableReplica)"
        )
    if gradients:
        return "summation order", (
            "in this step every layer computed the same bits for every sample, forward and backward; the sums of the "
            f"samples' gradients differ ({len(gradients)} tensors)"
        )
    statistics = list(_differing("state/", reference, other))
    if statistics:
        return _cause_in_statistics(statistics, "no layer's output differs", reference, other)
    if any(_differing("", reference, other)):
        return "other", "the gradients are the same, but the parameters after the update are not"
    return "summation order", "every tensor and every sample is the same; only the sum of the samples' losses differs"


def _cause_in_layer(output: str, count: str, reference: StepDump, other: StepDump) -> tuple[Cause, str]:
    """Return the cause where the output of a layer is the first to differ: its input and parameters are the same."""
    if output == "input":
        return "other", f"the samples themselves differ ({count})"
    direction, layer = output.split(" ", 1)
    part = "output" if direction == "forward" else "backward pass"
    first = f"the first to differ is the {part} of {layer}, in {count}"
    statistics = [name for name in reference if name.startswith(f"state/{layer}.")]
    if statistics:
        return _cause_in_statistics(statistics, first, reference, other)
    if layer.startswith("dropout"):
        return "other", f"{first}, from the same input: other random numbers"
    return "shape", f"{first}, from the same input and parameters: it was computed in another shape"


def _cause_in_statistics(names: list[str], first: str, reference: StepDump, other: StepDump) -> tuple[Cause, str]:
    """Return the cause of differing batch-norm statistics: other samples, or another summation order if small."""
    gap = max(float(np.abs(reference[name].astype(np.float64) - other[name]).max()) for name in names)
    difference = gap / max(float(np.abs(reference[name]).max()) for name in names)
    size = f"{first}; its statistics differ by {difference:.2g} of the largest"
    if difference > ROUNDING:
        return "batch norm", f"{size}, so they are of other samples"
    return "summation order", f"{size}, which is rounding"


def _differing(prefix: str, reference: StepDump, other: StepDump) -> Iterator[str]:
    """Yield the names of the tensors with this prefix whose bits differ."""
    for name, value in reference.items():
        if name.startswith(prefix) and not name.startswith("samples/") and value.tobytes() != other[name].tobytes():
            yield name
