"""What a user's module raises, as one error with its place in the user's file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dpsim.errors import ConfigError, DpsimError
from dpsim.user_code import place_of

_TORCH = str(Path(torch.__file__).parent)


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
        place = place_of(error, _TORCH)
        raise ConfigError(
            f"{doing} raised {type(error).__name__}{f' ({place})' if place else ''}: {error}",
            allowed="a module that is called with the inputs [b, *input_shape] and returns scores [b, classes],"
            " and a loss of these and the labels [b]",
            remedy="see docs/pytorch.md, Your own module in dpsim's runtime",
        ) from error
