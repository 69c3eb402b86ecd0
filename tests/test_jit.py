"""Compiled functions kept on disk: never those of other constants or of another callee."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CALLER = """
from dpsim.jit import jit
from parts import SCALE, shifted

@jit
def result(x):
    return SCALE * shifted(x)

print(result(1.0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "shift", "expected"), [(2.0, 1.0, "4.0"), (3.0, 1.0, "6.0"), (3.0, 4.0, "15.0"), (2.0, 1.0, "4.0")]
)
def test_a_kept_function_follows_what_it_imports(
    scale: float, shift: float, expected: str, python: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The caller's file stays as it is; only the module from which it imports changes."""
    folder = Path(tmp_path_factory.getbasetemp()) / "kept"
    folder.mkdir(exist_ok=True)
    if not (folder / "caller.py").exists():
        (folder / "caller.py").write_text(CALLER, encoding="utf-8")
    shifted = f"from dpsim.jit import jit\nSCALE = {scale}\n\n@jit\ndef shifted(x):\n    return x + {shift}\n"
    (folder / "parts.py").write_text(shifted, encoding="utf-8")
    done = python("-B", str(folder / "caller.py"), env={"PYTHONPATH": str(folder)})
    assert done.stdout.strip() == expected, done.stderr
    assert any(folder.rglob("*.nbi"))
