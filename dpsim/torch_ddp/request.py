"""What the command line and the process that runs a PyTorch script say to each other. Loads no torch."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.torch_ddp.recorded import MODES
from dpsim.workload import Workload


class ScriptRequest(Noun, frozen=True):
    """A script to run as rank 0 of ``devices``, its arguments, and how many of its synchronising steps to record."""

    script: str
    arguments: tuple[str, ...] = ()
    devices: int = 1
    steps: int = 15

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"--devices is {self.devices}", allowed="1 or more")
        if self.steps < len(MODES):
            raise ConfigError(
                f"--steps is {self.steps}",
                allowed=f"{len(MODES)} or more",
                remedy="one is timed as a whole, one with a hook on each module, one with a hook on each gradient",
            )


class ScriptError(Noun, frozen=True):
    """The parts of a ``DpsimError``."""

    given: str
    allowed: str = ""
    remedy: str = ""


class ScriptOutcome(Noun, frozen=True):
    """What running a script came to: a workload, or why there is none."""

    workload: Workload | None = None
    error: ScriptError | None = None
