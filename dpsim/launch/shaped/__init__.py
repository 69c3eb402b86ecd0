"""Hosts for ranks on this machine: network namespaces, whose links the kernel shapes."""

import os

VARIABLE = "DPSIM_SWITCH"
"""In the ranks' environment: the socket of the switch that joins their hosts."""


def on_shaped_hosts() -> bool:
    """Return whether this process runs on a shaped host."""
    return VARIABLE in os.environ


_background: list[int] = []


def background() -> list[int]:
    """Return the process of the flow beside this job's own, where its network has one: it is part of the network."""
    return [*_background]


def background_is(processes: list[int]) -> None:
    """Note the process of that flow."""
    _background[:] = processes
