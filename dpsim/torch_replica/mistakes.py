"""What a user's module raises, as one error with its place in the user's file."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dpsim.errors import ConfigError, DpsimError

_OTHERS = tuple(str(Path(str(file)).parent) for file in (torch.__file__, Path(__file__).parent))
"""The folders of PyTorch and dpsim, in which no mistake of a user's is."""


@contextlib.contextmanager
def explained(doing: str, ours: Callable[[], BaseException | None] = lambda: None) -> Iterator[None]:
    """Raise ``ConfigError`` for an exception of a user's module; ``ours`` is one that is none of its."""
    try:
        yield
    except DpsimError:
        raise
    except Exception as error:
        if error is ours():
            raise
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OTHERS)]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise ConfigError(
            f"{doing} raised {type(error).__name__}{place}: {error}",
            allowed="a module that is called with the inputs [b, *input_shape] and returns scores [b, classes],"
            " and a loss of these and the labels [b]",
            remedy="see docs/pytorch.md, Your own module in dpsim's runtime",
        ) from error
