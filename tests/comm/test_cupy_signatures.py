"""Every call that is made on CuPy is one that the installed CuPy takes: names, numbers of arguments and keywords."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cupy_signatures import Call, calls_in, refusals

from dpsim.nn.device_ops import DeviceOps

pytestmark = pytest.mark.cupy
ROOT = Path(__file__).parents[2]

_NCCL = "cupy.cuda.nccl"
BY_FILE = {
    "dpsim/comm/cuda/gpu.py": {
        "cupy": "cupy",
        "cupy.cuda.Device(self.number)": "cupy.cuda.Device",
        "runtime": "cupy.cuda.runtime",
        "self.event": "cupy.cuda.Event",
        "self.cupy": "cupy.cuda.Stream",
        "array.data": "cupy.cuda.MemoryPointer",
        "target.data": "cupy.cuda.MemoryPointer",
        "pointer": "cupy.cuda.MemoryPointer",
    },
    "dpsim/comm/cuda/ipc.py": {"cupy": "cupy", "_runtime": "cupy.cuda.runtime"},
    "dpsim/comm/cuda/nccl.py": {
        "self._library": _NCCL,
        "self._communicator": f"{_NCCL}.NcclCommunicator",
        "library": _NCCL,
    },
    "dpsim/comm/cuda/available.py": {"cupy": "cupy"},
    "experiments/gpu_check/libraries.py": {"cupy": "cupy"},
}
"""What stands for something of CuPy in each file, as the code writes it."""

OTHERS = {
    "dpsim/comm/cuda/gpu.py": {
        *("bytes(ipc", "ctypes", "cuda", "cupy.cuda.runtime.getD", "driver", "ipc", "np", "self", "spare"),
    },
    "dpsim/comm/cuda/ipc.py": {"comm", "driver", "np", "opened", "ranks"},
    "dpsim/comm/cuda/nccl.py": {
        *("comm", "contextlib", "copy", "device", "dtype", "nccl", "np", "numbers", "received", "source", "stream"),
        *("self._nccl", "super()"),
        *("total", "wanted", "wrong", "calls", "', '"),
    },
}
"""What else the files that are all about CuPy call: each receiver there is one or the other."""


@pytest.mark.parametrize("file", BY_FILE)
def test_calls_of_the_transport_and_of_tools_are_those_that_cupy_takes(
    file: str, tmp_path: Path, python: Callable[..., Any]
) -> None:
    receivers = dict(sorted(BY_FILE[file].items(), key=lambda each: -len(each[0])))
    calls = list(calls_in(ROOT / file, receivers))
    if file in OTHERS:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        written = {ast.unparse(each.value) for each in functions if isinstance(each, ast.Attribute)}
        known = (*receivers, *OTHERS[file])
        assert not [each for each in written if not each.startswith(known)], "neither CuPy's nor known to be another's"
    assert calls and not refusals(calls, tmp_path, python)


def test_functions_that_layers_call_on_an_array_module_are_those_that_cupy_has(
    tmp_path: Path, python: Callable[..., Any]
) -> None:
    """What ``DeviceOps`` overrides is not called on CuPy."""
    receivers = {written: "cupy" for written in ("xp", "self.xp", "ops.xp", "self.ops.xp", "memory.xp")}
    overridden = {"NumpyOps", "tolerate_overflow", "channel_dot", "_group_sums", *vars(DeviceOps)} - {
        "operand",
        "matmul",
    }
    files = [*(ROOT / "dpsim/nn").glob("*.py"), *(ROOT / "dpsim/torch/module").glob("*.py"), ROOT / "dpsim/rng.py"]
    files.append(ROOT / "kernels/allreduce/reference.py")
    calls = [
        call for file in files for call in calls_in(file, receivers, overridden if file.name == "array_ops.py" else ())
    ]
    assert len(set(calls)) > 20 and not refusals(calls, tmp_path, python)


def test_a_call_that_cupy_does_not_take_is_told(tmp_path: Path, python: Callable[..., Any]) -> None:
    wrong = [
        Call("cupy.add", 2, ("where",)),
        Call("cupy.add", 4),
        Call("cupy.cuda.cublas.gemmEx", 18),
        Call("cupy.cuda.Event.record", 2),
        Call("cupy.errstate", 0, ("over",)),
        Call("cupy.ndarray.max", 0, ("initial",)),
        Call("cupy.stack", 1, ("dim",)),
    ]
    right = [Call("cupy.add", 2, ("out",)), Call("cupy.cuda.cublas.gemmEx", 19), Call("cupy.cuda.Event.record", 1)]
    told = refusals([*wrong, *right], tmp_path, python)
    assert [text.split(" with ")[0] for text in told] == sorted(call.name for call in wrong)
