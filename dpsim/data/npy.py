"""Reads NumPy's .npy and .npz files strictly and without pickle: whole arrays of plain numbers, or an error.

Format: a magic string, a version, the length of a header, the header (a dictionary as Python text), the elements.
Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.data.files import check_file, reading
from dpsim.errors import FileFormatError

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}  # of the header's length, by version
_NUMBERS = re.compile(r"[<>|=]?([iu][1248]|f[248])")
_DESCR = re.compile(r"'descr'\s*:\s*(?:'([^']*)'|(\[))")
_FORTRAN = re.compile(r"'fortran_order'\s*:\s*(True|False)")
_SHAPE = re.compile(r"'shape'\s*:\s*\(([\d,\s]{0,99})\)")  # fewer dimensions than NumPy's 64
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 1
_LARGE_BYTES, _MOST_RATIO = 2**28, 100  # a bomb is a thousand times larger than its file
_ODD = (ValueError, NotImplementedError, OverflowError)  # what zipfile raises, too, for numbers that make no sense


def read_npy(path: Path) -> NDArray[Any]:
    """The array of a .npy file. Raises ``FileFormatError``."""
    check_file(path, ".npy file")
    with reading(path, ".npy file"):
        data = path.read_bytes()
    return _array(data, str(path))


def read_npz(path: Path, choices: tuple[tuple[str, ...], ...]) -> dict[str, NDArray[Any]]:
    """The arrays of the first of ``choices`` (sets of names) that an .npz file has whole; others in it are not read.

    Raises ``FileFormatError``.
    """
    check_file(path, ".npz file")
    with reading(path, ".npz file"), _archive(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        names = next((names for names in choices if all(name in members for name in names)), None)
        if names is None:
            raise FileFormatError(
                f"{path} has the arrays {', '.join(sorted(members)[:20]) or '(none)'}",
                allowed="; or ".join(", ".join(names) for names in choices),
                remedy="numpy.savez(FILE, x_train=..., y_train=..., x_test=..., y_test=...) writes such a file",
            )
        return {name: _array(_member(archive, members[name], path), f"{name} in {path}") for name in names}


def _archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except _ODD as error:
        raise zipfile.BadZipFile(str(error)) from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> bytes:
    if info.compress_type not in _METHODS or info.flag_bits & _ENCRYPTED:
        raise FileFormatError(
            f"{info.filename} in {path} is encrypted or compressed in a way that NumPy does not use",
            allowed="files as numpy.savez and numpy.savez_compressed write them",
        )
    if info.file_size > max(_LARGE_BYTES, _MOST_RATIO * info.compress_size):
        raise FileFormatError(
            f"{info.filename} in {path} would be {info.file_size:,} bytes out of {info.compress_size:,}",
            allowed=f"up to {_MOST_RATIO} times its compressed size where it is larger than {_LARGE_BYTES:,} bytes",
            remedy="save it without compression, by numpy.savez, if it really holds that little",
        )
    try:
        return archive.read(info)
    except _ODD as error:
        raise zipfile.BadZipFile(f"{info.filename}: {error}") from error


def _array(data: bytes, where: str) -> NDArray[Any]:
    """The array that ``data`` holds in .npy format."""

    def refused(what: str, allowed: str, remedy: str = "it is cut off or damaged: save it again") -> FileFormatError:
        return FileFormatError(f"{where} {what}", allowed=allowed, remedy=remedy)

    width = _LENGTH_BYTES.get(data[6]) if len(data) > 7 and data.startswith(_MAGIC) else None
    if width is None:
        raise refused("is not in .npy format", f"a file that begins with {_MAGIC!r} and a version of 1 to 3")
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    header = data[8 + width : start].decode("latin-1")
    descr, fortran, shape_text = _DESCR.search(header), _FORTRAN.search(header), _SHAPE.search(header)
    if not (descr and fortran and shape_text) or len(data) < start:
        raise refused("has a damaged header", "a dictionary of 'descr', 'fortran_order' and 'shape'")
    if not _NUMBERS.fullmatch(descr[1] or ""):
        kind = "Python objects" if (descr[1] or "").endswith("O") else f"elements of type {descr[1] or 'structure'!r}"
        raise refused(
            f"holds {kind}",
            "integers and floating-point numbers; nothing pickled is read",
            "save it as numbers, for example with .astype(numpy.float32)",
        )
    dtype = np.dtype(descr[1])
    shape = tuple(int(side) for side in re.findall(r"\d+", shape_text[1]))
    size = math.prod(shape) * dtype.itemsize
    if not size:
        raise refused(f"has the shape {shape}", "arrays with elements")
    if size != len(data) - start:
        raise refused(f"has {len(data) - start} bytes of elements", f"{size} bytes: shape {shape} of {dtype}")
    flat = np.frombuffer(data, dtype, offset=start)
    return np.ascontiguousarray(flat.reshape(shape[::-1]).T) if fortran[1] == "True" else flat.reshape(shape)
