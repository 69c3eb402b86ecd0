"""``Results``: the memory of the results of layers on a device, shared by those that are not needed at once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import DTypeLike

from dpsim.replica import Array


class _Allocation:
    """Bytes of memory, and the result that lay there last.

    An array in them refers to ``flat``, or to what that is a view of itself. ``unheld`` are the references to these
    where there is no such array.
    """

    def __init__(self, flat: Array) -> None:
        self.flat, self.unheld = flat, 0
        self.holder: Hashable = None
        self._referred = [flat]
        while self._referred[-1].base is not None:
            self._referred.append(self._referred[-1].base)

    def serves(self, name: Hashable, size_bytes: int) -> bool:
        return len(self.flat) >= size_bytes and (self.holder == name or self.references() == self.unheld)

    def references(self) -> int:
        return sum(map(sys.getrefcount, self._referred))


class Results:
    """A lender of arrays by name. The next request of a name overwrites its array, which may be held until then.

    Memory that nobody holds any more serves other names. A name gets the same memory again where it can, so that in
    every step of a training each result lies where it lay in the step before: launches are bound to addresses.
    """

    def __init__(self, zeros: Callable[[tuple[int, ...], DTypeLike], Array]) -> None:
        self._zeros = zeros
        self._allocations: list[_Allocation] = []
        self._last: dict[Hashable, _Allocation] = {}

    def lend(self, name: Hashable, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an array of any values, which begins where memory of the device may begin."""
        size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        allocation = self._last.get(name)
        if allocation is None or not allocation.serves(name, size_bytes):
            serving = (each for each in self._allocations if each.holder != name and each.serves(name, size_bytes))
            allocation = min(serving, key=lambda each: len(each.flat), default=None) or self._new(size_bytes)
            self._last[name] = allocation
        allocation.holder = name
        return allocation.flat[:size_bytes].view(dtype).reshape(shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all memory."""
        return sum(len(allocation.flat) for allocation in self._allocations)

    def _new(self, size_bytes: int) -> _Allocation:
        self._allocations.append(_Allocation(self._zeros((size_bytes,), np.uint8)))
        self._allocations[-1].unheld = self._allocations[-1].references()
        return self._allocations[-1]
