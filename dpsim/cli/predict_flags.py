"""The flags of ``dpsim predict``: what is predicted and where, by which plans, and what is said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.algorithms import ALGORITHMS
from dpsim.cli import flags, readers
from dpsim.errors import ConfigError
from dpsim.registry import listed

if TYPE_CHECKING:
    from dpsim.machine import Machine
    from dpsim.records.convergence import Convergence
    from dpsim.workload import Workload

_RECOMPUTE = "recompute"
_ASSUMED = (
    "compute_slowdown",
    "loss_growth",
    "fixed_share",
    "contention",
    "computation_taken",
    "collective_overhead_s",
)


class FileFlags(flags.Flags):
    """The flags of what is predicted, where, and on how many devices."""

    workload: Path | None = flags.flag("A workload file from dpsim profile.")
    machine: str | None = flags.flag(
        "A machine file from dpsim calibrate, or a name of its --list; or several: the others are held against the "
        "first."
    )
    devices: str | None = flags.flag("Numbers of devices: 2,4,8 or 8..1024 (doubling), or layouts: 2x4.")
    collective: str | None = flags.flag(
        "Price collectives alone instead, from --machine: allreduce, reduce-scatter, all-gather, broadcast."
    )
    size: str | None = flags.flag("With --collective: the bytes of the whole array, like 1MiB,64MiB.")

    def machines(self) -> tuple[Path, ...]:
        """Return the machine files. Raises ``ConfigError``."""
        return readers.listed("--machine", self.machine, Path) or ()


class PlanFlags(
    flags.Flags,
    of="global_batch... local_batch... fusion_rule... fusion_threshold_bytes... algorithm... strategy",
    by_set="accumulate... batch_norm... cycle_s overlap wire_dtype leaves optimizer",
):
    """The flags of the plans that are predicted."""

    global_batch: str | None = flags.flag("Samples per step over all devices, one number or a list: strong scaling.")
    local_batch: str | None = flags.flag(
        "Samples that a device has at once, one number or a list: weak scaling (the largest profiled)."
    )
    algorithm: str | None = flags.flag(f"List of {listed(ALGORITHMS)}.")
    assume: list[str] | None = flags.flag(
        "What the machine file does not say, as NAME=VALUE,NAME=VALUE: compute_slowdown, times as long that computation"
        " takes on two devices as on one (assumed: 1.05); loss_growth, what each further doubling of them adds to its"
        " logarithm (assumed: 0.01); fixed_share of the layer times that no batch changes, where they are known at"
        " one batch (assumed: 0.09); contention, times as long as alone that a collective takes beside backward"
        " (assumed: 1.8); computation_taken, the part of its time inside a node that computation then takes longer"
        " (assumed: 0.5); collective_overhead_s, what the host adds to each collective, like 20us"
        " (assumed: 0). And recompute=none or all: whether backward computes the activations of the script's blocks"
        " again, as torch.utils.checkpoint does (as profiled).",
        negative="",
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a grid. Raises ``ConfigError``."""
        from dpsim.optimizer import Sgd, changed

        fields = self.values()
        return fields | ({"optimizer": changed(Sgd(), fields["optimizer"], {})} if "optimizer" in fields else {})

    def recomputing(self, workload: Workload) -> Workload:
        """Return a workload with the recomputation that ``--assume`` states. Raises ``ConfigError``."""
        from dpsim.model.recomputation import recomputing

        text = self._assigned_assumptions().get(_RECOMPUTE)
        return workload if text is None else recomputing(workload, text)

    def _assigned_assumptions(self) -> dict[str, str]:
        from dpsim.fields import assigned

        return assigned(self.assume or (), "--assume", (*_ASSUMED, _RECOMPUTE))

    def assumed(self, workload: Workload, machine: Machine) -> Machine:
        """Return a machine with what ``--assume`` states of it. Raises ``ConfigError``."""
        from dpsim.model.defaults import with_stated
        from dpsim.units import parse_duration

        for field, text in self._assigned_assumptions().items():
            if field == _RECOMPUTE:
                continue
            try:
                value = parse_duration(text) if field.endswith("_s") else float(text)
                if field == "compute_slowdown" and not 1 <= value < math.inf:
                    raise ConfigError("", allowed="a finite number of 1 or more: times as long as on one device")
                machine = with_stated(workload, machine, field, value)
            except ConfigError as error:
                given = f"--assume {field}={text}" + f": {error.given}" * bool(error.given)
                raise ConfigError(given, allowed=error.allowed, remedy=error.remedy) from error
            except ValueError:
                raise ConfigError(f"--assume {field}={text}", allowed="a number") from None
        return machine


class AnswerFlags(flags.Flags):
    """The flags of what is said, and where it goes."""

    target_loss: str | None = flags.flag(
        "LOSS:FILE, a training loss to reach, and the quality experiment's file of steps to it: also predict the time."
    )
    output: Path | None = flags.flag("Also write what --json prints to this file.")
    plot: Path | None = flags.flag("Draw efficiency and shares of the step against devices: a .png or .svg.")
    page: Path | None = flags.flag(
        "Write a page on which you move sliders and see the predicted step, one file to open or send; without"
        " --workload, --machine or --devices it begins with GoogLeNet on K80s, 10gbe and 8."
    )
    executor: flags.Executor = "1"
    json: flags.Json = False

    def convergence(self) -> Path | None:
        """Return the file of ``--target-loss``, ``None`` without one. Raises ``ConfigError`` for none in it."""
        if self.target_loss is None:
            return None
        loss, _, path = self.target_loss.partition(":")
        try:
            number = float(loss)
        except ValueError:
            number = math.nan
        if not path or not math.isfinite(number):
            raise ConfigError(
                f"--target-loss {self.target_loss}",
                allowed="a loss and a file of steps to it, like 0.5:FOLDER/convergence.json",
                remedy="python -m dpsim.experiments.quality --output FOLDER writes FOLDER/convergence.json",
            )
        return Path(path)

    def fit(self) -> Convergence | None:
        """Return the fit of steps to the target loss, ``None`` where none is asked for. Raises ``ConfigError``."""
        from dpsim.records import convergence

        path = self.convergence()
        return None if path is None else convergence.read(path).find(float(str(self.target_loss).partition(":")[0]))
