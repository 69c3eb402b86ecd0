"""Random numbers that are the same on every rank: Philox4x32-10, a hash of a counter and a key.

A stream is named by ``(purpose, seed, stream)``; element ``i`` comes from word ``i % 4`` of the counter ``i // 4``
(normals and 64-bit keys use two words each), so any part of a stream can be computed anywhere, in any order.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11); Random123 ``philox.h``.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim.errors import ConfigError

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_CHUNK = 8192  # counters at a time, so that the work arrays stay in the L2 cache


def philox(counters_N4: NDArray[np.uint32], key: tuple[int, int], xp: Any = np) -> NDArray[np.uint32]:
    """Philox4x32-10 of each counter: N counters of 4 words, and a key of 2 words, give N x 4 words of 32 bits.

    ``xp`` is the module of the arrays, NumPy or one with its functions.
    """
    words: NDArray[np.uint32] = xp.empty(counters_N4.shape, np.uint32)
    for start in range(0, len(counters_N4), _CHUNK):
        c0, c1, c2, c3 = counters_N4[start : start + _CHUNK].T.astype(np.uint64)
        k0, k1 = key
        for _ in range(_ROUNDS):
            p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
            c0 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0)
            c2 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1)
            c1, c3 = p1 & _LOW, p0 & _LOW
            k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
        for lane, word in enumerate((c0, c1, c2, c3)):
            words[start : start + _CHUNK, lane] = word
    return words


def check_seed(seed: int) -> None:
    """Raises ``ConfigError`` for a seed that would give the numbers of another one."""
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed is {seed}", allowed="0 to 2^64 - 1")


def random_words(purpose: str, seed: int, count: int, *, stream: int = 0) -> NDArray[np.uint32]:
    """The first ``count`` 32-bit words of the stream ``(purpose, seed, stream)``.

    Key = (CRC-32 of the purpose, low half of the seed); counter = (index low, index high, stream, seed's high half).
    """
    counters = np.zeros(((count + 3) // 4, 4), np.uint32)
    index = np.arange(len(counters), dtype=np.uint64)
    counters[:, 0] = index & _LOW
    counters[:, 1] = index >> _HALF
    counters[:, 2] = stream & 0xFFFFFFFF
    counters[:, 3] = (seed >> 32) & 0xFFFFFFFF
    return philox(counters, (zlib.crc32(purpose.encode()), seed & 0xFFFFFFFF)).reshape(-1)[:count]


def sample_bits(
    purpose: str, seed: int, shape: tuple[int, int], *, stream: int, first_sample: int = 0, xp: Any = np
) -> NDArray[np.uint16]:
    """[samples, elements] numbers of 16 bits, of samples ``first_sample``, ``first_sample + 1``, ...

    Sample s has the words of the stream from counter ``s * 2**32`` on, two elements a word, the lower half first.
    """
    samples, elements = shape
    counters = xp.empty((samples, (elements + 7) // 8, 4), np.uint32)
    counters[..., 0] = xp.arange(counters.shape[1])
    counters[..., 1] = xp.arange(first_sample, first_sample + samples)[:, None]
    counters[..., 2] = stream & 0xFFFFFFFF
    counters[..., 3] = (seed >> 32) & 0xFFFFFFFF
    words = philox(counters.reshape(-1, 4), (zlib.crc32(purpose.encode()), seed & 0xFFFFFFFF), xp)
    halves: NDArray[np.uint16] = words.astype("<u4", copy=False).view("<u2")
    return halves.reshape(samples, 8 * counters.shape[1])[:, :elements]


def uniform(
    purpose: str, seed: int, shape: tuple[int, ...], *, stream: int = 0, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Uniform numbers in [0, 1): the upper 24 bits of one word each, times 2**-24."""
    words = random_words(purpose, seed, math.prod(shape), stream=stream)
    return ((words >> np.uint32(8)) * 2.0**-24).astype(dtype).reshape(shape)


def normal(
    purpose: str, seed: int, shape: tuple[int, ...], *, stream: int = 0, dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """Standard normal numbers by Box-Muller: sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v) of two words."""
    count = math.prod(shape)
    words = random_words(purpose, seed, count + count % 2, stream=stream).reshape(-1, 2)
    values = np.empty(words.shape, dtype)
    for start in range(0, len(words), _CHUNK):
        u, v = (words[start : start + _CHUNK].T + 0.5) * 2.0**-32
        radius = np.sqrt(-2.0 * np.log(u))
        angle = v * (2.0 * np.pi)
        values[start : start + _CHUNK, 0] = radius * np.cos(angle)
        values[start : start + _CHUNK, 1] = radius * np.sin(angle)
    return values.reshape(-1)[:count].reshape(shape)


def permutation(n: int, seed: int, epoch: int, *, purpose: str = "shuffle") -> NDArray[np.int64]:
    """The permutation of 0..n-1 that sorts n random 64-bit keys (stably); one for each (seed, epoch)."""
    words = random_words(purpose, seed, 2 * n, stream=epoch).reshape(n, 2).astype(np.uint64)
    keys = (words[:, 0] << _HALF) | words[:, 1]
    return np.argsort(keys, kind="stable").astype(np.int64)
