"""How a kernel is started, without a GPU: by a driver that notes what it is called with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_cases as cases
import numpy as np
import pytest
from python_path import extended_path

from dpsim.errors import CommunicationError, ConfigError

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")
driver: Any = pytest.importorskip("cuda.bindings.driver")
RANKS = 4
SUPPORT = Path(__file__).parents[1] / "support"


class Recorded:
    """A kernel and a CUDA driver that run nothing and note what is started, on a GPU of ``at_once`` blocks at once."""

    CUresult, CUkernel = driver.CUresult, int

    def __init__(self, at_once: int, *, cooperative: bool = True, status: Any = driver.CUresult.CUDA_SUCCESS) -> None:
        self.at_once, self.cooperative, self.status = at_once, cooperative, status
        self.streams: list[int] = []
        self.started: list[tuple[Any, ...]] = []
        self.library, self.handle = self, 0

    def compile(self, types: Any) -> Any:
        return self

    def bind(self) -> None:
        self.handle = 7

    def get_cufunc(self) -> Any:
        return self

    def max_cooperative_grid_blocks(self, threads: int) -> int:
        return self.at_once

    def cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:
        return driver.CUresult.CUDA_SUCCESS, ("function", kernel)

    def CUstream(self, address: int) -> int:
        self.streams.append(address)
        return address

    def cuLaunchCooperativeKernel(self, *given: Any) -> tuple[Any, ...]:
        function, x, y, z, *threads, shared_bytes, stream, parameters = given
        assert (function, z, threads, shared_bytes) == (("function", 7), 1, [512, 1, 1], 0)
        addresses = (ctypes.c_int64 * 4).from_address(parameters)
        self.started.append(((x, y), stream, *(ctypes.c_int64.from_address(address).value for address in addresses)))
        return (self.status,)

    def cuLaunchKernel(self, *given: Any) -> tuple[Any, ...]:
        *others, extra = given
        assert extra == 0
        return self.cuLaunchCooperativeKernel(*others)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Recorded]]:
    """(Launch, its kernel) of a case."""
    from dpsim.kernels.allreduce.cuda import bound, prepare

    monkeypatch.setattr(prepare, "on_device", lambda words: cases.Host(np.array(words, np.int64)))

    def make(
        version: str,
        mode: str,
        *,
        at_once: int = 264,
        length: int = 1 << 20,
        status: Any = driver.CUresult.CUDA_SUCCESS,
        **changed: Any,
    ) -> tuple[Any, Recorded]:
        given, work = cases.prepared(cases.Case(version, "float32", RANKS, length), mode, **changed)
        kernel = Recorded(at_once, cooperative=work.scope is not None, status=status)
        monkeypatch.setattr(bound, "driver", kernel)
        return prepare.launch(given, replace(work, kernel=kernel)), kernel

    return make


class Stream:
    """A stream of numba's at an address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __int__(self) -> int:
        return self.address


@pytest.mark.parametrize("mode", ["one-launch", "flags"])
def test_a_launch_is_one_call_of_the_driver_with_arguments_packed_before(
    mode: str, recorded: Callable[..., Any]
) -> None:
    launch, kernel = recorded("two-shot", mode)
    one, other = Stream(4096), Stream(8192)
    for stream in (one, one, one, other, other, 0):
        for stage in launch.stages:
            stage(stream)
    assert kernel.streams == [4096, 8192, 0]  # looked up when it changes
    assert [call[1] for call in kernel.started] == [4096] * 3 + [8192] * 2 + [0]
    assert len({(call[0], *call[2:]) for call in kernel.started}) == 1


def test_a_refused_launch_is_an_error_that_names_the_drivers_answer(recorded: Callable[..., Any]) -> None:
    refused = driver.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    launch, _ = recorded("ring", "flags", status=refused)
    with pytest.raises(CommunicationError, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"):
        launch.stages[0](0)


def test_the_driver_takes_as_many_arguments_as_a_launch_passes() -> None:
    for launch, count in ((driver.cuLaunchCooperativeKernel, 10), (driver.cuLaunchKernel, 11)):
        first_line = launch.__doc__.splitlines()[0]
        assert len(first_line.split(",")) == count, first_line


def test_packed_arguments_keep_their_bits() -> None:
    from dpsim.kernels.allreduce.cuda import bound

    packed = bound.Packed((1, (-2, (2**62, np.float32(1 / 3))), np.float64(1 / 7)))
    addresses = (ctypes.c_int64 * 5).from_address(packed.address)
    kinds = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_double)
    values = [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
    assert values == [1, -2, 2**62, float(np.float32(1 / 3)), 1 / 7]


def test_stages_do_the_steps_one_after_another(recorded: Callable[..., Any]) -> None:
    def steps(version: str, mode: str, **changed: Any) -> tuple[int, list[tuple[int, int]], set[int]]:
        launch, kernel = recorded(version, mode, **changed)
        for stage in launch.stages:
            stage(0)
        return len(launch.stages), [call[2:4] for call in kernel.started], {call[4] for call in kernel.started}

    each = [(step, step + 1) for step in range(6)]
    assert steps("ring", "one-launch") == (1, [(0, 6)], {0})
    assert steps("ring", "flags") == (1, [(0, 6)], {1})
    assert steps("ring", "split") == (6, each, {0})
    assert steps("ring", "split", rank=2) == (8, each, {2})  # and where it is ready, and done
    assert steps("one-shot", "split") == (2, each[:2], {0})
    assert steps("two-shot", "split", rank=3) == (3, each[:1], {3})
    assert steps("two-shot", "one-launch") == (1, each[:1], {0})


def test_ranks_have_as_many_blocks_as_run_at_once_and_elements_need(recorded: Callable[..., Any]) -> None:
    def grid(version: str, mode: str, **changed: Any) -> Any:
        launch, kernel = recorded(version, mode, **changed)
        launch.stages[0](0)
        return kernel.started[0][0]

    assert grid("one-shot", "one-launch") == (66, RANKS)
    assert grid("one-shot", "one-launch", length=5000) == (3, RANKS)
    assert grid("two-shot", "one-launch", length=16_384) == (2, RANKS)
    assert grid("one-shot", "flags") == (64, 1)
    assert grid("one-shot", "flags", most_blocks=16, at_once=32) == (16, 1)
    with pytest.raises(ConfigError, match=r"of which this one runs 32 blocks at once\n.*\n.*with most_blocks=32"):
        recorded("one-shot", "flags", at_once=32)
    assert recorded("one-shot", "flags", at_once=32, most_blocks=1)[0].blocks_at_once == 32
    with pytest.raises(ConfigError, match="4 logical devices"):
        recorded("one-shot", "one-launch", at_once=3)


@pytest.mark.slow
def test_numba_cuda_itself_loads_kernels_and_launches_them_as_they_are_bound(
    python: Callable[..., Any], tmp_path: Path
) -> None:
    """A line of the driver: kind, blocks, ranks, threads, stream, first step, step to stop before."""
    variables = cases.stub_driver(tmp_path) | {"PYTHONPATH": extended_path(SUPPORT.parents[1], SUPPORT)}
    launched = ("one-shot", "one-launch", "two-shot", "one-launch", "ring", "split")
    done = python(str(SUPPORT / "launch_on_stub.py"), "4096", *launched, env=variables, timeout_s=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "launches").read_text().splitlines() == [
        "cooperative 32 2 512 4096 0 1",
        "plain 16 2 512 4096 0 1",
        "plain 16 2 512 4096 0 1",
        "plain 16 2 512 4096 1 2",
    ]


def test_a_table_is_on_the_device_before_a_kernel_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of numba's are done in the default stream, for which the streams of kernels do not wait."""
    from dpsim.kernels.allreduce.cuda import prepare

    copies: list[Callable[[], None]] = []

    def to_device(host: Any) -> Any:
        array = np.full_like(host, -1)
        copies.append(lambda: np.copyto(array, host))
        return array

    def synchronize() -> None:
        for copy in copies:
            copy()

    default_stream = SimpleNamespace(synchronize=synchronize)
    monkeypatch.setattr(prepare, "cuda", SimpleNamespace(to_device=to_device, default_stream=lambda: default_stream))
    assert prepare.on_device([3, 1, 2]).tolist() == [3, 1, 2]
