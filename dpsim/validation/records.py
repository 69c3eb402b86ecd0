"""What explains each large-batch record: the rate of a device, the efficiency, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from dpsim.collective import FLAT
from dpsim.model.interval import predict_with_interval
from dpsim.model.prices import FREE_NETWORK
from dpsim.model.residuals import LEVEL
from dpsim.model.step import price, scheduled
from dpsim.model.uncertainty import Uncertainty
from dpsim.report.table import Column, Table, table
from dpsim.report.words import counted
from dpsim.validation.judge import JudgedRow

DATASET = "records"
_IMAGES = 90 * 1_281_167
_OF_COLLECTIVES = [Uncertainty._fields.index(name) for name in ("network", "overlapped", "loss", "overhead")]
_OF_COMPUTATION = Uncertainty._fields.index("compute")
_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0}


class Share(NamedTuple):
    """A share of the predicted step, with the ends of its 90 % interval."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})"


def published_rate(row: JudgedRow) -> float:
    """Return the images/s of one device alone that the case states, at the local batch at which it was measured."""
    model = row.part.case.models[str(row.published.values["model"])]
    step_s = sum(seconds for seconds in (model.forward_s, model.backward_s) if seconds)
    return float(model.fields["local_batches"][0] / step_s)


def split(row: JudgedRow) -> dict[str, Share]:
    """Return what computation, waiting and communication are of the predicted step; the shares add up to 1.

    computation    alone / step: one device alone at this local batch; its interval follows from that of the step
    waiting        (free - alone) / step: what several devices need more on a free network; as uncertain as the
                   computation of several devices is beyond that of one
    communication  1 - free / step: what the network adds; as uncertain as collectives and their overlap are
    """
    own = row.inputs
    single = msgspec.structs.replace(
        own.plan, devices=1, layout=FLAT, global_batch=own.plan.local_batch * own.plan.accumulate
    )
    (of_one, ends_of_one), (of_all, ends) = (
        predict_with_interval(own.workload, own.machine, plan) for plan in (single, own.plan)
    )
    step_s = of_all.step_s
    free_s = price(scheduled(own.workload, own.machine, own.plan), own.machine, FREE_NETWORK).step_s
    deviations = ends.width.factor * NormalDist().inv_cdf((1 + LEVEL) / 2)
    alone = of_one.step_s
    error_of_one_s = of_one.step_s * ends_of_one.shifts  # seconds by which a step is longer
    error_of_all_s = step_s * ends.shifts
    compute_s = np.sqrt(np.maximum(np.square(error_of_all_s) - np.square(error_of_one_s), 0.0))[:, _OF_COMPUTATION]
    network_s = np.hypot.reduce(error_of_all_s[:, _OF_COLLECTIVES], axis=1)

    def share(part_s: float, errors_s: Sequence[float]) -> Share:
        """Return a part with its ends; ``errors_s`` are by how much it may be longer, and shorter."""
        up, down = (deviations * error for error in errors_s)
        return Share(part_s / step_s, max(part_s - down, 0.0) / step_s, (part_s + up) / step_s)

    return {
        "computation": Share(alone / step_s, alone / ends.high_s, alone / ends.low_s),
        "waiting": share(max(free_s - alone, 0.0), compute_s.tolist()),
        "communication": share(step_s - free_s, network_s.tolist()),
    }


def records_table(rows: Sequence[JudgedRow]) -> Table | None:
    """Return the table of the large-batch records, and none where there are no such rows."""
    records = [row for row in rows if row.dataset == DATASET]
    if not records:
        return None
    splits = {row.line: split(row) for row in records}

    def steps(row: JudgedRow) -> float:
        return _IMAGES / row.inputs.plan.global_batch

    def part(name: str) -> Column[JudgedRow]:
        return Column(head=name, cell=lambda r: str(splits[r.line][name]))

    columns: tuple[Column[JudgedRow], ...] = (
        Column(head="record", cell=lambda r: str(r.published.values["work"]), left=True),
        Column(head="devices", cell=lambda r: f"{r.devices:,}"),
        Column(head="steps", cell=lambda r: f"{steps(r):,.0f}", dispensable=1),
        Column(head="images/s a device", cell=lambda r: f"{r.inputs.plan.local_batch / r.measured:,.0f}"),
        Column(head="one device alone", cell=lambda r: f"{published_rate(r):,.0f}"),
        Column(head="efficiency", cell=lambda r: f"{r.inputs.plan.local_batch / r.measured / published_rate(r):.0%}"),
        *map(part, ("computation", "waiting", "communication")),
        Column(head="time", cell=lambda r: _duration(steps(r) * r.measured)),
        Column(
            head="predicted time",
            cell=lambda r: _duration(*(steps(r) * each for each in (r.predicted, r.low, r.high))),
        ),
    )
    return table(
        title="The large-batch records",
        columns=columns,
        sections={counted(len(records), "record"): records},
        note="Images/s a device are 90 epochs of ImageNet over the published time and the devices. Efficiency is that "
        "rate over the one published of one device alone. Computation, waiting for the slowest device and "
        "communication that is not hidden are shares of the predicted step, each with its 90% interval. Computation is "
        "that of one device at the record's local batch, as many times slower than the published rate as the other "
        "records say: evaluation, input, start and the software of its time are in no published input.",
    )


def _duration(seconds: float, *ends: float) -> str:
    """Return a time to train in the largest unit of which it is one or more, with its ends: ``36 min (27 to 50)``."""
    unit = next((unit for unit, length in _SECONDS.items() if seconds >= length), "s")
    value, *interval = (f"{each / _SECONDS[unit]:.3g}" for each in (seconds, *ends))
    return f"{value} {unit}" + (f" ({' to '.join(interval)})" if interval else "")
