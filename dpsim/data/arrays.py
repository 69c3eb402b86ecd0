"""Data sets from NumPy files: an .npz archive, or a pair of .npy files of samples and labels.

Files are read strictly and without pickle: whole arrays of plain numbers, or an error. The format of .npy: a magic
string, a version, the length of a header, the header (a dictionary as Python text), the elements.
Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import math
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim.data.dataset import (
    Dataset,
    Labels,
    Normalisation,
    channel_statistics,
    learnable,
    standardised,
    stratified,
)
from dpsim.data.files import check_file, path_of, reading
from dpsim.errors import ConfigError, FileFormatError

_WHOLE = ("x", "y")
_PARTS = ("x_train", "y_train", "x_test", "y_test")
_TEST_FRACTION = 0.2
_AT_ONCE = 256  # samples checked for infinities at once
_LARGEST = 2**31 - 1
_CLASSES = "classes 0 to K - 1, each with training samples"
_RENUMBER = "numpy.unique(y, return_inverse=True)[1] numbers the classes so"
_SHAPES = "[N, H, W, C], [N, H, W] or [N, features], nothing of size 0"


def from_npz(token: str, text: str, dtype: DTypeLike) -> Dataset:
    """Return the data set of the archive ``text``: x_train, y_train, x_test and y_test, or x and y, split 80/20.

    Samples of [N, H, W] have one channel, those of [N, features] become (1, 1, features). Each channel is brought to
    mean 0 and deviation 1 over the training part (a constant one to 0): uint8 a batch at a time, floats here.
    Raises ``ConfigError``, ``FileFormatError``.
    """
    path = path_of(text)
    arrays = read_npz(path, (_PARTS, _WHOLE))
    samples = {name: _samples(array, f"{name} in {path}") for name, array in arrays.items() if name[0] == "x"}
    labels = {name: _labels(array, f"{name} in {path}") for name, array in arrays.items() if name[0] == "y"}
    if "x" in samples:
        return _split(token, samples["x"], labels["y"], dtype)
    parts = (samples["x_train"], labels["y_train"], samples["x_test"], labels["y_test"])
    return _dataset(token, *parts, dtype)


def from_npy(token: str, text: str, dtype: DTypeLike) -> Dataset:
    """Return the data set of ``X.npy,Y.npy``, samples and labels, as ``from_npz`` makes it of x and y."""
    names = text.split(",")
    if len(names) != 2:
        raise ConfigError(
            f"data set {token!r} names {len(names)} file{'s' * (len(names) > 1)}",
            allowed="npy:X.npy,Y.npy, the paths without commas",
            remedy="numpy.savez puts arrays into one file, whose path may have commas: npz:FILE.npz",
        )
    x_path, y_path = (path_of(name) for name in names)
    x, y = _samples(read_npy(x_path), str(x_path)), _labels(read_npy(y_path), str(y_path))
    return _split(token, x, y, dtype)


def _samples(array: NDArray[Any], where: str) -> NDArray[Any]:
    """Return samples [N, H, W, C] of uint8 or finite floats."""
    if array.ndim not in (2, 3, 4) or not array.size:
        raise FileFormatError(f"{where} has the shape {array.shape}", allowed=f"samples of {_SHAPES}")
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise FileFormatError(
            f"{where} has the type {array.dtype}",
            allowed="uint8, float16, float32 or float64",
            remedy="convert it, for example with .astype(numpy.float32)",
        )
    if array.dtype.kind == "f":
        _check_finite(array, where)
    if array.ndim == 2:
        return array[:, None, None, :]
    return array[..., None] if array.ndim == 3 else array


def _check_finite(array: NDArray[Any], where: str) -> None:
    for start in range(0, len(array), _AT_ONCE):
        finite = np.isfinite(array[start : start + _AT_ONCE])
        if not finite.all():
            first, *rest = np.argwhere(~finite)[0].tolist()
            index = (start + first, *rest)
            raise FileFormatError(
                f"{where} is {array[index]} at {list(index)}",
                allowed="finite numbers",
                remedy="leave such samples out, or fill in what is missing",
            )


def _labels(array: NDArray[Any], where: str) -> Labels:
    """Return labels [N], whole numbers of 0 or more."""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise FileFormatError(
            f"{where} has the shape {array.shape} and the type {array.dtype}",
            allowed="labels [N] of an integer type",
            remedy="y.reshape(-1) makes [N] of [N, 1], y.argmax(axis=1) of one-hot rows; y.astype(int) makes integers",
        )
    wrong = np.flatnonzero((array < 0) | (array > _LARGEST))
    if len(wrong):
        raise FileFormatError(f"{where} is {array[wrong[0]]} at [{wrong[0]}]", allowed=_CLASSES, remedy=_RENUMBER)
    return array.astype(np.int64)


def _split(token: str, x: NDArray[Any], y: Labels, dtype: DTypeLike) -> Dataset:
    _check_counts(token, x, y)
    _check_gaps(token, y)
    test = stratified(y, _TEST_FRACTION)
    return _dataset(token, x[~test], y[~test], x[test], y[test], dtype)


def _dataset(
    token: str, train_x: NDArray[Any], train_y: Labels, test_x: NDArray[Any], test_y: Labels, dtype: DTypeLike
) -> Dataset:
    _check_counts(token, train_x, train_y)
    _check_counts(token, test_x, test_y)
    _check_gaps(token, train_y)
    if train_x.shape[1:] != test_x.shape[1:] or (train_x.dtype == np.uint8) != (test_x.dtype == np.uint8):
        raise FileFormatError(
            f"data set {token}: training samples {train_x.shape[1:]} of {train_x.dtype}, "
            f"test samples {test_x.shape[1:]} of {test_x.dtype}",
            allowed="samples of one shape, all uint8 or all floats",
        )
    classes = int(train_y.max()) + 1
    stored = learnable(
        Dataset(name=token, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y, classes=classes)
    )
    return _normalised(stored, dtype)


def _normalised(stored: Dataset, dtype: DTypeLike) -> Dataset:
    """Return ``stored`` with constants that give its channels mean 0 and deviation 1, applied if they are floats."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = channel_statistics(stored.train_x)
        if stored.train_x.dtype == np.uint8:
            normalisation = Normalisation.of_channels(mean, std, stored.input_shape, dtype)
            return replace(stored, normalisation=normalisation)
        train_x, test_x = (standardised(x, mean, std, dtype) for x in (stored.train_x, stored.test_x))
        sound = all(np.isfinite(part).all() for part in (mean, std, train_x, test_x))
    if not sound:
        raise FileFormatError(
            f"data set {stored.name} has samples too large to be brought to mean 0 and deviation 1",
            allowed="numbers of a size that float64 can square, test samples near the training samples",
            remedy="scale the samples",
        )
    return replace(stored, train_x=train_x, test_x=test_x)


def _check_counts(token: str, x: NDArray[Any], y: Labels) -> None:
    if len(x) != len(y):
        raise FileFormatError(f"data set {token}: {len(x)} samples with {len(y)} labels", allowed="one label a sample")


def _check_gaps(token: str, y: Labels) -> None:
    """Raise ``FileFormatError`` unless every class up to the largest has samples."""
    classes = np.unique(y)
    gaps = np.flatnonzero(classes != np.arange(len(classes)))
    if len(gaps):
        raise FileFormatError(
            f"data set {token}: class {gaps[0]} has no training sample, class {classes[-1]} has some",
            allowed=_CLASSES,
            remedy=_RENUMBER,
        )


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
    """Return the array of a .npy file. Raises ``FileFormatError``."""
    check_file(path, ".npy file")
    with reading(path, ".npy file"):
        data = path.read_bytes()
    return _array(data, str(path))


def read_npz(path: Path, choices: tuple[tuple[str, ...], ...]) -> dict[str, NDArray[Any]]:
    """Return the arrays of the first of ``choices`` (sets of names) that an .npz file has in full, and no others.

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
    """Return the array that ``data`` holds in .npy format."""

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
