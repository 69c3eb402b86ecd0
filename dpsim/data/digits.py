"""``digits``: scikit-learn's pictures of digits, as they are or made harder by noise and fewer samples."""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
import re
from importlib import resources

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim import rng
from dpsim.data.dataset import Dataset, stratified
from dpsim.errors import ConfigError, FileFormatError, unknown

DIGITS_FORM = "digits[:noise=SD,samples=N]"
_SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
_MOST_NOISE = 100.0
_SHAPE = (8, 8, 1)
_MEAN = 0.305  # of pixels / 16
_TEST_SHARE = 0.2


def digits(token: str, settings: str | None, seed: int, dtype: DTypeLike) -> Dataset:
    """Return 1797 pictures of 8x8x1 with pixels / 16, less their mean; one fixed stratified 80/20 split.

    ``noise=0.35`` adds normal noise of this standard deviation to every pixel of both parts (a pixel is 0 to 1), and
    ``samples=640`` keeps so many training samples. ``seed`` draws both, and nothing else: without settings the data set
    is the same for every seed. Raises ``ConfigError`` for settings that are not understood.
    """
    noise, samples = _parse(token, settings)
    table = _read()
    x = table[:, :-1] / 16.0 - _MEAN
    y = table[:, -1].astype(np.int64)
    test = stratified(y, _TEST_SHARE)
    if noise:
        x = x + noise * rng.normal("digits noise", seed, x.shape, dtype=np.float64)
    x = x.astype(dtype).reshape(-1, *_SHAPE)
    train_x, train_y = x[~test], y[~test]
    if samples is not None:
        _check_samples(token, samples, len(train_y))
        chosen = np.sort(rng.permutation(len(train_y), seed, 0, purpose="digits samples")[:samples])
        train_x, train_y = train_x[chosen], train_y[chosen]
    return Dataset(name=token, train_x=train_x, train_y=train_y, test_x=x[test], test_y=y[test], classes=10)


def _parse(token: str, settings: str | None) -> tuple[float, int | None]:
    """Return (noise, samples) of the settings. Raises ``ConfigError``."""
    noise, samples = 0.0, None
    if settings is None:
        return noise, samples
    names = set[str]()
    for setting in settings.split(","):
        name, _, value = setting.partition("=")
        if name not in ("noise", "samples"):
            raise unknown(f"setting of {token!r}:", name, ("noise", "samples"), remedy=f"write {DIGITS_FORM}")
        if name in names:
            raise ConfigError(f"data set {token!r} sets {name} twice", allowed=f"{name} once")
        names.add(name)
        if name == "samples":
            samples = int(value) if re.fullmatch(r"\d{1,9}", value) else 0
        else:
            noise = float(value) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", value) else math.nan
    if not 0 <= noise <= _MOST_NOISE:
        raise ConfigError(
            f"data set {token!r} has a noise that is not understood",
            allowed=f"a standard deviation from 0 to {_MOST_NOISE:g}; a pixel is 0 to 1",
            remedy="for example digits:noise=0.35",
        )
    return noise, samples


def _check_samples(token: str, samples: int, most: int) -> None:
    if not 2 <= samples <= most:
        raise ConfigError(
            f"data set {token!r} has {samples} samples to train on",
            allowed=f"a whole number of samples from 2 to {most}",
            remedy="for example digits:noise=0.35,samples=640",
        )


def _read() -> NDArray[np.float64]:
    """Return 1797 rows of 64 pixels (0 to 16) and a label. Raises ``FileFormatError`` for a file that was changed."""
    file = resources.files("dpsim.data") / "digits.csv.gz"
    data = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise FileFormatError(
            f"{file}, the data set digits, {'has another SHA-256' if data else 'is missing'}",
            allowed=f"the file that comes with dpsim, of SHA-256 {_SHA256}",
            remedy="install dpsim again, or use a synthetic data set",
        )
    return _parsed(data)


@functools.lru_cache(maxsize=1)
def _parsed(data: bytes) -> NDArray[np.float64]:
    text = gzip.decompress(data).decode("ascii")
    table = np.fromstring(text.replace("\n", ",").rstrip(","), np.float64, sep=",").reshape(1797, 65)
    table.flags.writeable = False
    return table
