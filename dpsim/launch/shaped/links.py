"""Asks the switch of shaped hosts for the links of a network, which it refuses where the hosts are too slow."""

from __future__ import annotations

import json
import math
import os
import socket

from dpsim.errors import ConfigError
from dpsim.launch.shaped.hosts import VARIABLE
from dpsim.network import Network
from dpsim.units import format_bandwidth

LEAST_CEILING = 3.0
"""A rate is emulated only where the hosts' links carry so many times as much when they are not shaped."""
_ANSWER_S = 30.0


def on_shaped_hosts() -> bool:
    """Return whether this process runs on a shaped host."""
    return VARIABLE in os.environ


def check_ceiling(network: Network, ceiling_bytes_per_s: float) -> None:
    """Raise ``ConfigError`` for a rate of which unshaped links do not carry ``LEAST_CEILING`` times as much."""
    fastest = max(network.rates_bytes_per_s())
    if fastest * LEAST_CEILING > ceiling_bytes_per_s:
        raise ConfigError(
            f"the network {network.token}: unshaped, a link of these hosts carries "
            f"{format_bandwidth(ceiling_bytes_per_s)}, {ceiling_bytes_per_s / fastest:.2g} times the rate, so that the "
            "cores would be timed and not the links",
            allowed=f"rates up to a third of that, {format_bandwidth(ceiling_bytes_per_s / LEAST_CEILING)}",
            remedy=f"lower the rate or the {network.hosts} hosts; two hosts carry most",
        )


def shape(network: Network | None, switch: str = "") -> None:
    """Give the links of hosts the rates of a network; of ``None`` none: they are as fast as they go.

    ``switch`` is the socket of what joins the hosts; by default that of this process's own host. Hosts that the network
    does not have get its usual rate. Raises ``ConfigError`` for a condition that this machine's kernel cannot bring
    about.
    """
    request: dict[str, object] = {"rates": [], "uplink": 0.0, "background": 0.0, "delay_s": 0.0, "loss": 0.0}
    if network is not None:
        uplink = network.uplink_bytes_per_s
        request = {
            "rates": network.rates_bytes_per_s(),
            "uplink": uplink if math.isfinite(uplink) else 0.0,
            "background": (network.condition("background") or 0.0) * network.rate_bytes_per_s,
            "delay_s": network.condition("delay") or 0.0,
            "loss": network.condition("loss") or 0.0,
        }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(switch or os.environ[VARIABLE])
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline() or b'{"error": "the switch has ended"}')
        except OSError as error:
            answer = {"error": f"the switch does not answer: {error}"}
    if "error" in answer:
        raise ConfigError(
            f"the network {network.token if network else 'unshaped'} cannot be made here: {answer['error']}",
            allowed="what this machine's kernel can do: delay needs its netem, loss the command nft",
            remedy="leave the condition out, or measure on a machine that has it",
        )
