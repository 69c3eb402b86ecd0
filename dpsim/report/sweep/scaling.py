"""What the report of a sweep over the number of devices says: speedup, and beside it the drift from one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpsim.records.comparison import ComparedPoint, Comparison, Group
from dpsim.report.sweep.tables import LEGEND, MEASURED_MARK, PREDICTED_MARK, Column, Section, Table, by_network
from dpsim.report.words import (
    EMULATED_COMPUTE,
    best_measured,
    best_predicted,
    devices_name,
    milliseconds,
    milliseconds_beside,
    network_name,
    percent,
    skill_text,
)

DIGITS = 8
RULES = (
    "After the timing every device count trained the same steps from the same start, on this machine's own network: an "
    "emulated one changes times, not bits. What is predicted of the drift was made from the run on one device, and "
    "written and hashed, before any other of these runs began.",
)
_WEAK = "Drift is not measured under weak scaling: every device count trains other batches, so another model."


def answers(comparison: Comparison) -> Iterator[str]:
    """A sentence or two a network, then what became of the training."""
    for group in comparison.groups:
        yield _answer(comparison, group)
    error = comparison.single_device_median_abs_error
    if error is not None:
        yield (
            "One device is scored apart, because without communication the prediction only repeats the profiled times: "
            f"error {percent(error)}."
        )
    if (sentence := drift_sentence(comparison)) is not None:
        yield sentence


def _answer(comparison: Comparison, group: Group) -> str:
    best, guess = best_measured(comparison, group), best_predicted(comparison, group)
    where = network_name(group.network, group.emulated_network) + (EMULATED_COMPUTE if best.emulated_compute else "")
    if group.below_noise:
        text = (
            f"On {where}, more devices make no difference: the speed changes by {percent(group.effect)}, and the "
            f"uncertainty of these medians is {percent(group.noise_floor)}"
        )
    elif best.devices == 1:
        counts = ", ".join(p.layout for p in comparison.members(group) if p.devices > 1)
        text = f"Do not use {counts} devices on {where}: one device trains fastest, {_speed(best)}"
    else:
        text = f"On {where}, {devices_name(best.devices)}{_layout(best)} trained fastest: {_speed(best)}"
    if guess is not best and not group.below_noise:
        text += (
            f"; the model chose {devices_name(guess.devices)}{_layout(guess)}, {_speed(guess)} "
            f"(regret {percent(group.regret, sign=True)})"
        )
    step = group.step
    return (
        f"{text}. The median error of predicted step times was {percent(step.median_abs_error)}, the best baseline's "
        f"{percent(step.null_median_abs_error)} (skill {skill_text(step.skill)})."
    )


def _layout(point: ComparedPoint) -> str:
    return f" ({point.layout})" if "x" in point.layout else ""


def _speed(point: ComparedPoint) -> str:
    text = f"{milliseconds(point.measured_step_s)} ms per step"
    if point.devices == 1 or point.measured_speedup is None or point.predicted_speedup is None:
        return text
    return f"{text}, speedup {point.measured_speedup:.2f} (predicted {point.predicted_speedup:.2f})"


def drift_sentence(comparison: Comparison) -> str | None:
    """What became of the training on more devices; None where nothing was trained for it."""
    scaling = comparison.scaling
    if scaling is not None and scaling.kind == "weak":
        return _WEAK
    points = [point for point in comparison.scored if point.digest]
    if scaling is None or not points:
        return None
    several = unique(point for point in points if point.devices > 1)
    counts = ", ".join(point.layout for point in several)
    after = f"after {scaling.steps} steps with batch norm {scaling.batch_norm}"
    if comparison.identical is not None:
        verdict = "the same to the bit as" if comparison.identical else "NOT THE SAME, as promised, as"
        return (
            f"The training is {verdict} on one device {after} and {scaling.leaves} leaves, on {counts} devices: digest "
            f"{points[0].digest[:DIGITS]}."
        )
    parameters = _each([(one.layout, one.measured_drift, one.predicted_drift) for one in several])
    text = f"Drift from one device {after}: parameters {parameters}"
    if any(one.measured_statistics_drift is not None for one in several):
        means = _each([(o.layout, o.measured_statistics_drift, o.predicted_statistics_drift) for o in several])
        text += f"; error of a device's means in the first batch norm, in standard deviations, {means}"
    return text + "."


def unique(points: Iterator[ComparedPoint]) -> list[ComparedPoint]:
    """The first point of each layout: networks with one algorithm share a training."""
    return list({point.layout: point for point in reversed(list(points))}.values())[::-1]


def _each(found: Sequence[tuple[str, float | None, float | None]]) -> str:
    """``0.0011 on 2 devices (predicted 0.001), ...``."""
    return ", ".join(
        f"{measured:.2g} on {layout}" + (f" (predicted {predicted:.2g})" if predicted is not None else "")
        for layout, measured, predicted in found
        if measured is not None
    )


def tiles(comparison: Comparison, group: Group) -> list[tuple[str, str]]:
    """(value, label) of a network's numbers worth seeing at once."""
    best, guess = best_measured(comparison, group), best_predicted(comparison, group)
    most = max(comparison.members(group), key=lambda point: point.devices)
    found = [
        (devices_name(best.devices), f"fastest, {milliseconds(best.measured_step_s)} ms per step"),
        (devices_name(guess.devices), "predicted fastest"),
    ]
    if most.measured_speedup is not None and most.predicted_speedup is not None:
        label = f"speedup on {devices_name(most.devices)}, predicted {most.predicted_speedup:.2f}x"
        found.append((f"{most.measured_speedup:.2f}x", label))
    step = group.step
    found.append((percent(step.median_abs_error), "median error of the step time"))
    found.append((skill_text(step.skill), f"skill; best baseline errs {percent(step.null_median_abs_error)}"))
    if comparison.identical is not None:
        found.append(("same bits" if comparison.identical else "OTHER BITS", f"digest {most.digest[:DIGITS]}"))
    elif most.measured_statistics_drift is not None and most.predicted_statistics_drift is not None:
        label = (
            f"error of a device's batch-norm mean on {devices_name(most.devices)}, in standard deviations; predicted "
        )
        found.append((f"{most.measured_statistics_drift:.2g}", label + f"{most.predicted_statistics_drift:.2g}"))
    elif most.measured_drift is not None:
        found.append((f"{most.measured_drift:.2g}", f"drift of the parameters on {devices_name(most.devices)}"))
    return found


def points_table(comparison: Comparison) -> Table:
    """A row a network and device count: step, speedup and drift, each measured beside predicted."""
    longest = max(p.measured_step_s for p in comparison.points)
    shown = comparison.scored
    optional = {
        "algorithm": len({p.algorithm for p in shown}) > 1,
        "drift": any(p.digest for p in shown),
        "predicted": any(p.predicted_drift is not None for p in shown),
        "statistics": any(p.measured_statistics_drift is not None for p in shown),
    }
    columns = [
        Column(head="devices"),
        Column(head="algorithm", left=True, dispensable=3),
        Column(head="measured ms"),
        Column(head="95% interval", left=True, dispensable=7),
        Column(head="predicted ms"),
        Column(head="error"),
        Column(head="speedup"),
        Column(head="predicted speedup"),
        Column(head="speedup error", dispensable=2),
        Column(head="efficiency", dispensable=2),
        Column(head="exposed ms", dispensable=4),
        Column(head="predicted exposed", dispensable=8),
        Column(head="drift"),
        Column(head="predicted drift"),
        Column(head="batch-norm means", dispensable=1),
        Column(head="predicted means", dispensable=1),
        Column(head="digest", left=True, dispensable=5),
        Column(head="samples", dispensable=9),
        Column(head="best", left=True),
    ]
    needs = [""] * len(columns)
    needs[1], needs[12:17] = "algorithm", ["drift", "predicted", "statistics", "statistics", "drift"]
    kept = [i for i, need in enumerate(needs) if optional.get(need, True)]
    sections = []
    for network, points in by_network(shown, lambda p: network_name(p.network, p.emulated_network)).items():
        rows = [_row(point, longest) for point in points]
        sections.append(
            Section(
                title=f"{network}, overlap {comparison.chosen_overlap.get(points[0].network, 'off')}",
                rows=tuple(tuple(row[i] for i in kept) for row in rows),
                strong=tuple(i for i, p in enumerate(points) if p.is_best_measured or p.is_best_predicted),
            )
        )
    return Table(
        title="Measured and predicted",
        columns=tuple(columns[i] for i in kept),
        sections=tuple(sections),
        note=_note(comparison),
    )


def _row(point: ComparedPoint, longest: float) -> tuple[str, ...]:
    several = point.devices > 1

    def ms(seconds: float) -> str:
        return milliseconds_beside(seconds, longest)

    measured, predicted = point.measured_speedup, point.predicted_speedup
    speedups = ("", "", "", "")
    if several and measured is not None and predicted is not None:
        speedups = (
            f"{measured:.2f}x",
            f"{predicted:.2f}x",
            percent(predicted / measured - 1, sign=True),
            percent(measured / point.devices),
        )
    mark = MEASURED_MARK * point.is_best_measured + PREDICTED_MARK * point.is_best_predicted
    return (
        point.layout,
        point.algorithm if several else "",
        ms(point.measured_step_s),
        f"{ms(point.measured_low_s)} to {ms(point.measured_high_s)}",
        ms(point.predicted_step_s) + ("*" if point.extrapolated else ""),
        percent(point.error, sign=True),
        *speedups,
        ms(point.exposed_communication_s) if several else "",
        ms(point.predicted_exposed_communication_s) if several else "",
        _number(point.measured_drift),
        _number(point.predicted_drift),
        _number(point.measured_statistics_drift),
        _number(point.predicted_statistics_drift),
        point.digest[:DIGITS],
        str(point.samples),
        mark,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _note(comparison: Comparison) -> str:
    scaling = comparison.scaling
    weak = scaling is not None and scaling.kind == "weak"
    text = (
        f"{LEGEND}. Median step, 95% bootstrap interval of the median; error = predicted / measured - 1; speedup = "
        f"samples/s over those of 1 device at the same {'local' if weak else 'global'} batch; efficiency = speedup / "
        "devices; exposed = communication not hidden by computation."
    )
    if any(p.digest for p in comparison.scored):
        text += (
            f" Drift = |w_n - w_1| / |w_1| of all parameters after {scaling.steps if scaling else 0} steps; 0: the "
            f"bits are the same. Digest: the first {DIGITS} digits of the trained state's SHA-256."
        )
    if any(p.measured_statistics_drift is not None for p in comparison.scored):
        text += (
            " Batch-norm means: of the first batch norm, a device's against the whole batch's, before training; root "
            "mean square over the first 16 batches, in standard deviations. What they do to the parameters is not "
            "predicted."
        )
    return text
