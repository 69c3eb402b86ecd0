"""What ends a user's script from within: enough is recorded, or dpsim refuses to go on. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import ClassVar, NoReturn

from dpsim.errors import ConfigError

ENDED_EARLY = "the script ended after"
"""How the error of a script begins that ended before enough was measured."""
WITH_ACCUMULATE = "--accumulate, and the script "
"""How the error of a script begins that cannot be made to accumulate."""


class Ending(BaseException):
    """Ends the script, which does not expect it. ``begun`` is called with each, for a script may catch it and go on."""

    begun: ClassVar[Callable[[Ending], None]] = staticmethod(lambda _: None)

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        Ending.begun(self)


class EnoughSteps(Ending):
    """Ends the script once enough steps are recorded."""


class Refused(Ending):
    """Ends a script that cannot be profiled or measured."""

    def __init__(self, error: ConfigError) -> None:
        self.error = error
        super().__init__(str(error))


def second_model(verb: str) -> Refused:
    """Return what ends a script that trains two models; ``verb`` is what dpsim was to do with it."""
    return Refused(
        ConfigError(
            "the script trains two models with DistributedDataParallel or fully_shard",
            allowed="one model, as a workload is",
            remedy=f"{verb} a script that trains one of them, or wrap both in one module; where they are parts of"
            " one, call fully_shard on the whole model as well",
        )
    )


def check_ranks(asked: int, ranks: int, call: str) -> None:
    """Raises ``Refused`` unless ``call`` of the script asks for as many ranks as it gets."""
    if asked != ranks:
        raise Refused(
            ConfigError(
                f"{call} asks for {asked} rank{'' if asked == 1 else 's'}, and --devices is {ranks}",
                allowed="the same number, for the script may divide its batch by it",
                remedy=f"{f'give --devices {asked}' if asked > 0 else 'give the script a number of ranks'}, or let the"
                " script take the number from the environment variable WORLD_SIZE, as under torchrun",
            )
        )


def unwrapped() -> Refused:
    """What ends a script that reduces its gradients itself."""
    return Refused(
        ConfigError(
            "the script reduces its gradients without calling a DistributedDataParallel model",
            allowed="a script that wraps its model in torch.nn.parallel.DistributedDataParallel, or calls fully_shard",
            remedy="wrap the model, call what DistributedDataParallel returns, and leave out the script's own"
            " all_reduce, or replicate()",
        )
    )


def unreduced() -> Refused:
    """What ends a script that updates while the gradients of its last micro-batch are each rank's own."""
    return Refused(
        ConfigError(
            "the script updates after a backward() that does not synchronise: each rank then trains by itself, for its"
            " last micro-batch is within no_sync(), or set_requires_gradient_sync(False) holds for it",
            allowed="a script whose last micro-batch before the optimizer's step synchronises",
            remedy="set require_backward_grad_sync (FSDP: set_requires_gradient_sync) to True before its forward",
        )
    )


def unpriced_precision() -> Refused:
    """What ends a script that gives DDP ``mixed_precision``, which has types that DDP does not log."""
    return Refused(
        ConfigError(
            "the script gives DistributedDataParallel mixed_precision, which PyTorch has on trial and for GPUs alone",
            allowed="torch.autocast, parameters in 16 bits, or fully_shard with a MixedPrecisionPolicy",
            remedy="use one of them, or leave it out to predict the rest",
        )
    )


def forked() -> Refused:
    """What ends a script that trains in a process it has forked."""
    return Refused(
        ConfigError(
            "the script trains in a process that it has started itself",
            allowed="a script whose ranks torchrun or torch.multiprocessing.spawn starts",
            remedy="start them by one of the two, in place of multiprocessing.Process or os.fork",
        )
    )


def end_process(code: int) -> NoReturn:
    """End this process, with whatever threads the script has left behind, once what it has printed is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
