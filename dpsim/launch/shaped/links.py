"""Asks the switch of shaped hosts for the links of a network, which it refuses where the hosts are too slow."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
from collections.abc import Iterable, Sequence

from dpsim.errors import ConfigError
from dpsim.launch.shaped import VARIABLE
from dpsim.network import Network
from dpsim.units import format_bandwidth

LEAST_CEILING = 3.0
"""A rate is emulated only where the hosts' links carry so many times as much when they are not shaped."""
CEILING_BYTES, CEILING_WARM_UPS, CEILING_SAMPLES = 2**20, 5, 15
"""The allreduces that tell what unshaped links carry: the first ones do not count."""
_ANSWER_S = 30.0


def carried_bytes_per_s(ranks: int, taken_s: Sequence[float]) -> float:
    """Return what each link carried in each direction in allreduces of ``CEILING_BYTES`` that took so long (median)."""
    return 2 * (ranks - 1) / ranks * CEILING_BYTES / statistics.median(taken_s[CEILING_WARM_UPS:])


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


def not_its_hosts(network: Network) -> ConfigError:
    """Return the error of a command that has not started its ranks on the hosts of a network."""
    return ConfigError(
        f"the network {network.token} with a command that does not start its ranks on shaped hosts",
        allowed="node, or paced:LATENCY,BANDWIDTH",
        remedy="use one of them, or a command that does: calibrate, sweep or train",
    )


def check(networks: Iterable[Network], address: str) -> None:
    """Raise ``ConfigError`` for a condition that this machine's kernel cannot bring about, before any rank starts."""
    tried = False
    for network in networks:
        if network.condition("delay") or network.condition("loss"):
            shape(network, address)
            tried = True
    if tried:
        shape(None, address)


def shape(network: Network | None, address: str | None = None) -> list[int]:
    """Give the links of this job's hosts the rates of a network; of ``None`` none: they are as fast as they go.

    Returns the process of the flow beside the ranks' messages, where there is one.
    ``address`` is that of their switch, which ranks on the hosts know. Raises ``ConfigError`` for a condition that this
    machine's kernel cannot bring about.
    """
    address = address or os.environ[VARIABLE]
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
            connection.connect(address)
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
    return list(answer["background"])
