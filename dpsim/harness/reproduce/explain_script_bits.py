"""Which bucket caps of a script's DDP give gradients of the same bits over gloo, said before any rank starts.

The script runs once as rank 0 of so many ranks in a process of its own, and its gradients are put into the buckets of
each cap. It holds for processors, and where all ranks take batches of one size.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from dpsim.ddp_settings import DdpSettings
from dpsim.harness.reproduce.lettered import Comparison, LetteredRun
from dpsim.harness.reproduce.script import ScriptComparison
from dpsim.kernels.allreduce.expression import normal_form, text
from dpsim.lowering.ddp import DdpOptions, DdpParameter
from dpsim.model.bits import letter
from dpsim.progress import Progress
from dpsim.torch.ddp_bits import ReducedGradient, first_difference
from dpsim.torch.script.profile_script import profile_script
from dpsim.torch.script.request import ScriptRequest
from dpsim.units import format_size
from dpsim.workload import Workload

_STEPS = 4
_WIRE_BYTES = {"fp16_compress_hook": 2, "bf16_compress_hook": 2}
_OTHER_SHARES = "on another number of devices a rank computes other samples, in shapes for which PyTorch adds otherwise"


class ExplainedScriptBits:
    """The bits of a script's gradients, as ``dpsim.harness.reproduce.lettered.LetteredRuns``.

    There is a run for each number of devices and bucket cap (None: the script's own).
    """

    title = "bits of gradients"
    against = "against the first"

    def __init__(self, comparison: ScriptComparison, progress: Progress) -> None:
        self._settings = [*itertools.product(dict.fromkeys(comparison.devices), comparison.caps_bytes or (None,))]
        progress(f"{comparison.script} as rank 0 of {comparison.devices[0]}")
        request = ScriptRequest(
            script=comparison.script,
            arguments=comparison.arguments,
            devices=comparison.devices[0],
            steps=_STEPS,
            script_may_write=comparison.script_may_write,
        )
        self._workload = profile_script(request, by=comparison.by)
        self._unknown = _not_known(self._workload)
        laws: list[int] = []
        for number in range(len(self._settings)):
            laws.append(next((law for law in laws if self._same(number, law)), number))
        numbers = [*dict.fromkeys(laws)]
        self.runs = [
            LetteredRun(
                name=f"{devices} devices, {'its own cap' if cap is None else format_size(cap)}",
                section="",
                settings={"devices": devices, "bucket_cap_bytes": cap},
                letter=letter(numbers.index(law)),
                law=law,
            )
            for (devices, cap), law in zip(self._settings, laws, strict=True)
        ]

    def reference(self, number: int) -> int:
        """Return the first run."""
        return 0

    def _same(self, number: int, other: int) -> bool:
        return number == other or self.compare(number, other).same is True

    def compare(self, number: int, other: int) -> Comparison:
        """Compare a run with another one."""
        (devices, cap), (other_devices, other_cap) = self._settings[number], self._settings[other]
        if number == other or (devices == other_devices and (cap == other_cap or devices == 1)):
            return Comparison(same=True, why="both are one setting, or nothing is added over ranks")
        if devices != other_devices or self._unknown:
            return Comparison(same=None, why=self._unknown or _OTHER_SHARES)
        ddp = self._workload.ddp or DdpSettings(torch="", devices=devices)
        tensors = self._workload.tensors
        difference = first_difference(
            [
                ReducedGradient(
                    name=tensor.name,
                    elements=tensor.elements,
                    parameter=DdpParameter(size_bytes=tensor.size_bytes, dtype=tensor.dtype),
                )
                for tensor in tensors
            ],
            self._workload.ready_order.tensor.tolist(),
            devices,
            (_options(ddp, cap), _options(ddp, other_cap)),
            _WIRE_BYTES.get(ddp.communication_hook),
        )
        if difference is None:
            order = "0+1 is the one order of a sum of two" if devices == 2 else "each element keeps its order of ranks"
            return Comparison(same=True, why=f"every rank computes the same samples, and {order}")
        here, there = (text(normal_form(each)) for each in difference.expressions)
        of_element = f" (element {difference.element})" if difference.element else ""
        why = f"its sum over ranks{of_element} is {here} here, and {there} there"
        return Comparison(same=False, step=difference.step, tensor=f"gradients/{difference.name}", why=why)


def _options(ddp: DdpSettings, cap_bytes: float | None) -> DdpOptions:
    """Return DDP's options with another cap (None: the script's own)."""
    version = re.match(r"(\d+)\.(\d+)", ddp.torch)
    newest = DdpOptions().torch_version
    return DdpOptions(
        bucket_cap_bytes=ddp.bucket_cap_bytes if cap_bytes is None else cap_bytes,
        static_graph=ddp.static_graph,
        torch_version=newest if version is None else (int(version[1]), int(version[2])),
    )


_NOT_KNOWN: tuple[tuple[str, Callable[[DdpSettings], object]], ...] = (
    ("it calls fully_shard", lambda ddp: ddp.units),
    ("its buckets are known as a whole alone", lambda ddp: ddp.whole_buckets),
    ("find_unused_parameters keeps DDP's first buckets", lambda ddp: ddp.find_unused_parameters),
    ("bucket_cap_mb_list gives each bucket a cap of its own", lambda ddp: ddp.bucket_caps_bytes),
    ("some gradients are sparse", lambda ddp: ddp.sparse_gradient_bytes),
    ("it reduces gradients in several micro-batches of a step", lambda ddp: not ddp.deferred or ddp.reduces),
    (
        "its communication hook may add in another order",
        lambda ddp: ddp.communication_hook not in ("", "allreduce_hook", *_WIRE_BYTES),
    ),
)
"""What a script does of which the order of its sums is not known, and when."""


def _not_known(workload: Workload) -> str:
    """Return why the order of a script's sums is not known; empty where it is."""
    ddp = workload.ddp
    if ddp is None:
        return "it wraps its model in no DistributedDataParallel"
    return next((f"{why}, whose sums dpsim does not follow" for why, does in _NOT_KNOWN if does(ddp)), "")
