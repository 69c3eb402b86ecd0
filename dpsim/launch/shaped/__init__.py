"""Hosts for ranks on this machine: network namespaces, whose links the kernel shapes."""

import os

VARIABLE = "DPSIM_SWITCH"
"""In the ranks' environment: the socket of the switch that joins their hosts."""


def on_shaped_hosts() -> bool:
    """Return whether this process runs on a shaped host."""
    return VARIABLE in os.environ
