"""What backward computes again, for ``torch.utils.checkpoint``, whose inner calls this is put around. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

KeepAll = Callable[[Any], Any]
"""Gets each tensor that a region which would be computed again reads."""


class Recomputation:
    """Times what backward computes again, where it is ``timed``; with ``keep_all`` forward keeps everything instead.

    What one call of ``checkpoint`` computes is a region; ``region`` is the number of the one that is under way, where
    everything is kept (0: none).
    """

    def __init__(self, now: Callable[[], float], in_backward: Callable[[], bool]) -> None:
        self._now, self._in_backward = now, in_backward
        self.seconds = 0.0
        self.timed = False
        self.keep_all: KeepAll | None = None
        self.region = 0
        self._regions = 0
        self._computes = False

    def listen(self, wrap: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Put this around both kinds of checkpoints, by ``Script.wrap``."""
        from torch.utils import checkpoint

        wrap(checkpoint, "_checkpoint_without_reentrant_generator", self._checkpoint)
        wrap(checkpoint.CheckpointFunction, "apply", self._checkpoint_reentrant)

    def _checkpoint(self, original: Any, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Call what is resumed before and behind the forward of a region: a generator."""
        if self.keep_all is not None and not self.region:
            return self._keeping_all((arguments, keywords))
        return original(self._again(function), *arguments, **keywords)

    def _checkpoint_reentrant(self, original: Any, function: Any, preserves: Any, /, *arguments: Any) -> Any:
        """Call the forward of a region whose backward is one inside another."""
        if self.keep_all is None or self.region:
            return original(self._again(function), preserves, *arguments)
        around = self._keeping_all(arguments)
        next(around)
        result = function(*arguments)
        next(around, None)
        return result

    def _keeping_all(self, inputs: Any) -> Iterator[None]:
        assert self.keep_all is not None
        for each in torch.utils._pytree.tree_leaves(inputs):
            if isinstance(each, torch.Tensor):
                self.keep_all(each)
        self._regions += 1
        self.region = self._regions
        try:
            yield
        finally:
            self.region = 0

    def _again(self, function: Any) -> Any:
        def computed(*arguments: Any, **keywords: Any) -> Any:
            if self._computes or not (self.timed and self._in_backward()):
                return function(*arguments, **keywords)
            self._computes, began_s = True, self._now()
            try:
                return function(*arguments, **keywords)
            finally:  # it is left by an exception once all that backward needs is there
                self._computes, self.seconds = False, self.seconds + self._now() - began_s

        return computed
