"""Machine code of kernels, compiled once and kept on disk.

A file is named by the hash of everything its content depends on: the sources of this folder, what is asked of the
kernel, the processor, LLVM. So an edited kernel is another file, and nothing is ever out of date. What was not used for
some weeks is removed, by the names that dpsim gives: the folder may be one of the user's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import llvmlite
import llvmlite.binding as llvm

from dpsim import processor
from dpsim.kernels.vector import Kernel

Function = Callable[..., Any]
P = ParamSpec("P")

_KEPT_S = 60 * 86_400
_OWN = re.compile(r"\.?\w+-[0-9a-f]{32}\.(o|json|lock)(\.\w+\.partial)?")
"""Names of kernels, of choices (``dpsim.runtime.choice_file``), and of files that a killed process has left of both."""
_DIGEST_BYTES = 32


class Counts:
    """Numbers of kernels that this process compiled, and that it read from the cache."""

    compiled = 0
    read = 0


counts = Counts()
_engines: list[Any] = []
_one_at_a_time = threading.Lock()  # LLVM's compiler and loader are not for several threads at once


def folder() -> Path | None:
    """Return the folder of machine code: ``$DPSIM_CACHE_DIR``, else ``dpsim`` in the user's cache folder, or None."""
    if own := os.environ.get("DPSIM_CACHE_DIR"):
        return Path(own) / "kernels"
    if own := os.environ.get("XDG_CACHE_HOME"):
        return Path(own) / "dpsim" / "kernels"
    try:
        return Path.home() / ".cache" / "dpsim" / "kernels"
    except RuntimeError:  # a user without a home
        return None


def compiled(write: Callable[P, Kernel]) -> Callable[P, Function]:
    """Turn a function that writes a kernel into one that returns it compiled.

    The compiled kernel takes C-contiguous arrays of its dtype (one that returns an index: addresses, as numbers), then
    indices, then numbers. It runs without Python's
    lock and checks neither dtype nor shape: its caller must. Without a writable cache folder every process compiles for
    itself. The arguments of ``write`` must have different ``repr``.
    """
    functions: dict[object, Function] = {}

    def find(*args: P.args, **kwargs: P.kwargs) -> Function:
        what = (args, *kwargs.items())
        if what not in functions:
            with _one_at_a_time:
                functions[what] = _find(write, *args, **kwargs)
        return functions[what]

    return find


def _find(write: Callable[P, Kernel], *args: P.args, **kwargs: P.kwargs) -> Function:
    key = _key(write.__module__, write.__name__, args, kwargs)
    symbol = f"kernel_{key}"
    cache_folder = folder()
    path = None if cache_folder is None else cache_folder / f"{write.__name__.strip('_')}-{key}.o"
    code = None if path is None else _read(path)
    if code is None:
        code = _compile(write(*args, **kwargs), symbol)
        counts.compiled += 1
        if path is not None:
            _write(path, code)
    else:
        counts.read += 1
    return _callable(symbol, code)


@functools.cache
def circumstances() -> bytes:
    """Return what every kernel's machine code depends on."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    target = (*processor.target(), llvm.get_default_triple(), llvmlite.__version__)
    return b"\0".join([*(file.read_bytes() for file in sources), *map(str.encode, target)])


def _key(*what: object) -> str:
    return hashlib.sha256(circumstances() + repr(what).encode()).hexdigest()[:32]


def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = processor.target()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu,
        features=features,
        opt=3,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


@functools.cache
def _compiler() -> Any:
    return _target_machine()


def _compile(kernel: Kernel, symbol: str) -> bytes:
    """Return a line with the types of the arguments, and an object file."""
    module = llvm.parse_assembly(kernel.text(symbol))
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    passes = llvm.create_pass_builder(_compiler(), options)
    passes.getModulePassManager().run(module, passes)
    return f"{kernel.signature}\n".encode() + bytes(_compiler().emit_object(module))


def _callable(symbol: str, code: bytes) -> Function:
    """Return the function in an object file.

    Each has an engine of its own, for ever. With several files in one, LLVM finds the constants of a later one through
    the address table of the first (RuntimeDyldELF, R_X86_64_GOTOFF64): wrong numbers, once a file calls the C library.
    """
    signature, _, machine_code = code.partition(b"\n")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    _engines.append(engine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
    arguments, _, result = signature.decode().partition(">")
    call = ctypes.CFUNCTYPE(kinds.get(result), *(kinds[kind] for kind in arguments))(
        engine.get_function_address(symbol)
    )
    arrays = arguments.count("p")
    if result:
        return call  # its caller knows addresses

    def run(*values: Any) -> None:
        call(*[_pointer(array) for array in values[:arrays]], *values[arrays:])

    return run


def _pointer(array: Any) -> Any:
    try:
        return ctypes.byref(ctypes.c_char.from_buffer(array))  # half the time of array.ctypes
    except (TypeError, ValueError):  # read-only, without elements, or not contiguous
        if not array.flags.c_contiguous:
            raise
        return array.ctypes.data


def _read(path: Path) -> bytes | None:
    """Read the code in a file; None if there is none, it has changed, or others could have written it.

    It is run as it is: the file must be this user's or root's, and no one else may write to it.
    """
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_uid not in (0, os.getuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            data = file.read()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() != digest:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return code


def _write(path: Path, code: bytes) -> None:
    """Keep code for other processes, if the folder lets us; a reader sees all of a file or nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False
        ) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
        for other in path.parent.iterdir():
            if _OWN.fullmatch(other.name) and other.stat().st_mtime < time.time() - _KEPT_S:
                other.unlink()
