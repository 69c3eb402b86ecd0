"""The processor that dpsim's code is compiled for, and the variable that limits it."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim import processor

Python = Callable[..., subprocess.CompletedProcess[str]]
LIMIT = {"DPSIM_VECTORS": "avx2"}
pytestmark = pytest.mark.skipif("avx2" not in processor._cpuinfo("flags").split(), reason="needs a processor with AVX2")

ASSEMBLY = """
import numpy as np
from dpsim import jit
from dpsim.kernels import cache, elementwise, matmul, weight_gradient

machine = cache._target_machine()
emit = machine.emit_object

def emit_and_print(module):
    print(machine.emit_assembly(module))
    return emit(module)

machine.emit_object = emit_and_print
cache._compiler = lambda: machine

x, w, out, mask = (np.ones((64, 64), kind) for kind in (np.float32, np.float32, np.float32, bool))
elementwise.relu(x, out, mask)
matmul.product(x, w, out)
matmul.product_with_transposed(x, w, out)
weight_gradient.transposed_product(x, w, out)

def total(a, b):
    for i in range(len(a)):
        a[i] += 2.0 * b[i]

add = jit.jit(total).dispatcher()
add(x[0], w[0])
print(*add.inspect_asm().values())
assert cache.counts.compiled >= 4
"""


def assembly(python: Python, folder: Path, **env: str) -> str:
    done = python("-c", ASSEMBLY, env={"DPSIM_CACHE_DIR": str(folder), **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_code_that_is_limited_to_avx2_has_no_instruction_of_avx512(python: Python, tmp_path: Path) -> None:
    text = assembly(python, tmp_path, **LIMIT)
    assert re.findall(r"%zmm\d+|%[xy]mm(?:1[6-9]|2\d|3[01])\b|%k[0-7]\b", text) == []
    assert text.count("%ymm") > 100


@pytest.mark.skipif("avx512f" not in processor._cpuinfo("flags").split(), reason="needs a processor with AVX-512")
def test_without_the_limit_kernels_use_the_whole_processor_and_none_of_them_is_read_with_it(
    python: Python, tmp_path: Path
) -> None:
    assert assembly(python, tmp_path, DPSIM_VECTORS="").count("%zmm") > 100
    whole = {file.name for file in (tmp_path / "kernels").iterdir()}
    assembly(python, tmp_path, **LIMIT)
    limited = {file.name for file in (tmp_path / "kernels").iterdir()} - whole
    assert len(limited) == len(whole)


def test_the_limit_reaches_the_ranks(on_ranks: Callable[..., Any], limited: None) -> None:
    family = f"{processor._cpuinfo('vendor_id')} avx2"
    assert on_ranks("ranks_kernels:targets", devices=2) == [[family, "x86-64-v3", 8]] * 2


def test_the_environment_names_the_limit_and_measured_choices_are_kept_apart(python: Python) -> None:
    program = (
        "from dpsim.study.environment import environment\n"
        "from dpsim.runtime import choice_file\n"
        "here = environment()\n"
        "print(here.processor, here.variables.get('DPSIM_VECTORS'), here.variables.get('NUMBA_CPU_NAME'))\n"
        "print(choice_file.path())\n"
    )
    whole, choices = python("-c", program, env={"DPSIM_VECTORS": ""}).stdout.splitlines()
    limited, limited_choices = python("-c", program, env=LIMIT).stdout.splitlines()
    assert limited.endswith(", limited to AVX2 avx2 x86-64-v3") and "limited" not in whole
    assert choices != limited_choices


@pytest.mark.parametrize("value", ["avx512", "AVX2", "sse", "1"])
def test_another_limit_is_refused_before_anything_runs(python: Python, value: str) -> None:
    done = python("-m", "dpsim", "train", "--model", "mlp:4", "--steps", "1", env={"DPSIM_VECTORS": value})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"DPSIM_VECTORS={value}" in done.stderr and "allowed: avx2" in done.stderr


def test_numba_that_has_compiled_without_the_limit_is_refused(python: Python) -> None:
    program = (
        "import os\n"
        "for name in ('NUMBA_CPU_NAME', 'NUMBA_CPU_FEATURES'):\n"
        "    os.environ.pop(name, None)  # where these tests run with the limit themselves\n"
        "import numba\nnumba.njit(lambda: 1)()\nfrom dpsim import jit\njit.load_numba()\n"
    )
    done = python("-c", program, env=LIMIT)
    assert done.returncode == 1 and "NUMBA_CPU_NAME=x86-64-v3" in done.stderr


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(*next(iter(LIMIT.items())))
    processor.limited.cache_clear()
    yield
    processor.limited.cache_clear()


@pytest.mark.parametrize(
    ("bits", "named"),
    [
        (0, "to nearest"),
        (0x2000, "down"),
        (0x4000, "up"),
        (0x6000, "to zero"),
        (0x8000, "to nearest, subnormal results flushed to zero"),
        (0x0040, "to nearest, subnormal operands taken for zero"),
    ],
)
def test_rounding_and_subnormal_numbers_are_named_as_the_thread_has_them(bits: int, named: str) -> None:
    libm, before, changed = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(before)
    libm.fegetenv(changed)
    changed[7] |= bits  # the register MXCSR
    libm.fesetenv(changed)
    try:
        actual = processor.rounding()
    finally:
        libm.fesetenv(before)
    assert actual == named
