"""Whether shaped hosts can be made here, and what is left of them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.launch.scratch import scratch
from dpsim.launch.shaped.hosts import shaped_hosts
from dpsim.network import Network


@functools.cache
def why_there_are_no_shaped_hosts() -> str:
    """Say why shaped hosts cannot be made here; empty where they can."""
    try:
        with scratch("test") as folder, shaped_hosts([Network.parse("shaped:2x1gbit")], folder):
            return ""
    except ConfigError as error:
        return error.given


def skip_without_shaped_hosts() -> None:
    """Skip the test that calls this, with the reason, where shaped hosts cannot be made."""
    if reason := why_there_are_no_shaped_hosts():
        pytest.skip(reason)


def devices() -> set[str]:
    """Return the network devices of this process's namespace: no host's and no switch's is among them."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    return {line.partition(":")[0].strip() for line in lines}
