"""Holds calls against the signatures of the CuPy that is installed: a program, which imports it without a driver.

``python cupy_signatures.py FILE``: FILE has calls as JSON, each the name of what is called, its positional arguments
and its keywords. It prints, as JSON, the number of calls that fit and what is wrong with the others.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from python_path import extended_path

_STUBBED = ("libcublasLt.so.{}", "libcublas.so.{}", "libnccl.so.2")
"""Libraries that CuPy's modules are linked to. Nothing of them is called, so empty ones do."""


class Call(NamedTuple):
    """A call of ``name``, like ``cupy.cuda.Stream.wait_event``, with ``given`` positional arguments and ``keywords``.

    ``given`` is None where how many there are is known only when it runs.
    """

    name: str
    given: int | None
    keywords: tuple[str, ...] = ()


def calls_in(path: Path, receivers: Mapping[str, str], leave_out: Iterable[str] = ()) -> Iterator[Call]:
    """The calls of a file whose receiver is one of ``receivers``, by how the code writes it; the name it stands for.

    Classes and functions in ``leave_out`` are not looked at.
    """
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8")), frozenset(leave_out)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called = ast.unparse(node.func)
        for written, name in receivers.items():
            if re.fullmatch(re.escape(written) + r"(\.\w+)+", called):
                unpacked = any(isinstance(each, ast.Starred) for each in node.args)
                keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
                yield Call(name + called.removeprefix(written), None if unpacked else len(node.args), keywords)
                break


def _nodes(node: ast.AST, leave_out: frozenset[str]) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name in leave_out:
            continue
        yield child
        yield from _nodes(child, leave_out)


def refusals(calls: Iterable[Call], folder: Path, python: Callable[..., Any]) -> list[str]:
    """What the CuPy that is installed refuses of these calls. Skips without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) for stubs of CUDA's libraries")
    (folder / "empty.c").touch()
    for name in (pattern.format(major) for pattern in _STUBBED for major in (12, 13)):
        options = [f"-Wl,-soname,{name}", "-o", str(folder / name), str(folder / "empty.c")]
        subprocess.run([compiler, "-shared", "-fPIC", *options], check=True, timeout=60)
    asked = sorted(set(calls), key=str)
    (folder / "calls.json").write_text(json.dumps(asked))
    given = os.environ.get("LD_LIBRARY_PATH", "")
    env = {"LD_LIBRARY_PATH": f"{given}:{folder}".lstrip(":"), "PYTHONPATH": extended_path(Path(__file__).parents[2])}
    ran = python(str(Path(__file__)), str(folder / "calls.json"), env=env, timeout_s=120)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["fitting"] + len(answer["refused"]) == len(asked)
    return answer["refused"]  # type: ignore[no-any-return]


def _refusal(call: Call) -> str:
    """Why CuPy does not take a call; empty if it does."""
    import cupy
    import cupy.cuda.nccl

    function: Any = cupy
    try:
        for part in call.name.split(".")[1:]:
            function = getattr(function, part)
    except AttributeError as error:
        return str(error)
    if call.given is None:
        return ""
    if isinstance(function, cupy.ufunc):
        return _refused_by_ufunc(function, call)
    try:
        signature(function).bind(*[0] * call.given, **dict.fromkeys(call.keywords, 0))
    except TypeError as error:
        return f"{error}: {signature(function)}"
    return ""


def _refused_by_ufunc(ufunc: Any, call: Call) -> str:
    """A ufunc looks at what it is given before it asks for a device."""
    try:
        ufunc(*[1] * (call.given or 0), **dict.fromkeys(call.keywords))
    except TypeError as error:
        return str(error)
    except Exception:  # of any kind that says that there is no device
        return ""
    return ""


def signature(function: Any) -> inspect.Signature:
    """The signature of a function, class or method without ``self``; Cython puts it where the docstring begins."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        line = (function.__doc__ or "").strip().splitlines()[0]
        inside = line[line.index("(") + 1 : line.rindex(")")]
        parameters = list(_parameters(each.strip() for each in inside.split(",") if each.strip()))
    return inspect.Signature([each for each in parameters if each.name != "self"])


def _parameters(texts: Iterable[str]) -> Iterator[inspect.Parameter]:
    """The parameters of texts like ``intptr_t stream``, ``out=None`` and ``*shape``."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for text in texts:
        declared, _, default = text.partition("=")
        name = declared.split()[-1]
        if name.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            if name != "*":
                several = inspect.Parameter.VAR_KEYWORD if name.startswith("**") else inspect.Parameter.VAR_POSITIONAL
                yield inspect.Parameter(name.lstrip("*"), several)
            continue
        yield inspect.Parameter(name, kind, default=default or inspect.Parameter.empty)


if __name__ == "__main__":
    sys.setdlopenflags(os.RTLD_LAZY)  # so that what the empty libraries lack is missed only where it is called
    warnings.simplefilter("ignore")
    held = {Call(name, given, tuple(keywords)) for name, given, keywords in json.loads(Path(sys.argv[1]).read_text())}
    reasons = {call: _refusal(call) for call in held}
    refused = [f"{call.name} with {call.given} {list(call.keywords)}: {why}" for call, why in reasons.items() if why]
    print(json.dumps({"fitting": len(held) - len(refused), "refused": sorted(refused)}))
