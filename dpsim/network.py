"""``Network``: what joins the devices: this machine as it is, a link in user space, or hosts shaped by the kernel."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from typing import Any

from dpsim.codec import Noun
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError, unknown
from dpsim.units import parse_bandwidth, parse_duration, parse_share

NODE = "node"
MOST_HOSTS = 64
LEAST_RATE_BYTES_PER_S = 125e3
"""Of a shaped link: 1 Mbit/s, at which a message of 1 MiB takes 8 s."""
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_FORMS = "node, paced:LATENCY,BANDWIDTH, or shaped:HOSTSxBANDWIDTH"
_EXAMPLE = "write it like paced:50us,1gbit or shaped:4x200mbit"
_PACED, _SHAPED = "paced", "shaped"


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 < value < math.inf:
        raise ConfigError(f"{text!r} is no factor", allowed="a number above 1, such as 4")
    return value


def _share(text: str) -> float:
    if not 0 < (value := parse_share(text)) < 1:
        raise ConfigError(f"{text!r} is no part of a whole", allowed="more than 0% and less than 100%")
    return value


CONDITIONS = {
    "rate": parse_bandwidth,
    "oversubscribed": _factor,
    "slow-host": _share,
    "background": _share,
    "delay": parse_duration,
    "loss": _share,
}
"""What can be changed on a shaped network after ``+``, and how its value is read.

``rate``: the rate of every link. ``oversubscribed``: the first and the second half of the hosts are behind a switch
each, and the link between the two carries the sum of one half's rates, divided by this factor. ``slow-host``: the
second host's link has this share of the rate. ``background``: a flow from the first host to the second takes this share
of the rate. ``delay``: each host sends so much later. ``loss``: the share of packets that each host loses on receipt.
"""


class Network(Noun, frozen=True):
    """What connects the devices: ``node`` (this machine as it is), or an emulated network.

    ``paced:LATENCY,BANDWIDTH`` holds each message to a link in user space. ``shaped:HOSTSxBANDWIDTH`` has a host for
    each rank, a network namespace of this machine's kernel, which sends real TCP over a link that the kernel shapes;
    ``conditions`` (``CONDITIONS``) follow, as in ``shaped:4x200mbit+slow-host=50%``. Calibrations are of ``plain``, the
    network without them.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    token: str = NODE
    hosts: int = 0
    conditions: tuple[tuple[str, float], ...] = ()

    @property
    def emulated(self) -> bool:
        """Whether what it is called is not what this machine has: it is labelled, and scored apart."""
        return self.token != NODE

    @property
    def shaped(self) -> bool:
        """Whether the kernel shapes links between hosts of their own."""
        return self.hosts > 0

    @property
    def paced(self) -> bool:
        """Whether each message is held to a link in user space, whose times are exact."""
        return self.emulated and not self.shaped

    @property
    def wire_latency_s(self) -> float | None:
        """The latency of a paced link; ``None`` for networks whose latency is not stated."""
        return self.latency_s if self.paced else None

    @property
    def plain(self) -> Network:
        """The network without its conditions."""
        if not self.conditions:
            return self
        return Network.parse(self.token.partition("+")[0])

    def condition(self, name: str) -> float | None:
        """Return the value of a condition; ``None`` where it has none."""
        return dict(self.conditions).get(name)

    @property
    def rate_bytes_per_s(self) -> float:
        """The rate of a link that no host has changed."""
        return self.condition("rate") or self.bandwidth_bytes_per_s

    def rates_bytes_per_s(self) -> list[float]:
        """Return the rate of each host's link, in each direction."""
        rates = [self.rate_bytes_per_s] * self.hosts
        if (share := self.condition("slow-host")) is not None and self.hosts > 1:
            rates[1] *= share
        return rates

    @property
    def uplink_bytes_per_s(self) -> float:
        """The rate of the link between the two halves of the hosts; infinite where one switch joins all."""
        factor = self.condition("oversubscribed")
        return math.inf if factor is None else self.hosts // 2 * self.rate_bytes_per_s / factor

    def default_algorithm(self, wire_dtype: str | None = None) -> str:
        """Return the algorithm if none is named: the fastest by size; on a link ``ring``, or one that sends 16 bits."""
        if not self.emulated:
            return "auto"
        return "direct" if wire_dtype in SIXTEEN_BITS else "ring"

    @staticmethod
    @functools.lru_cache(maxsize=256)  # every price of a step asks
    def parse(token: str) -> Network:
        """Parse ``node``, ``paced:50us,1gbit`` or ``shaped:4x200mbit+slow-host=50%``. Raises ``ConfigError``."""
        if token == NODE:
            return Network()
        kind, _, rest = token.partition(":")
        if kind == _SHAPED:
            return _parse_shaped(token, rest)
        parts = rest.split(",")
        if kind != _PACED or len(parts) != 2:
            raise ConfigError(f"network {token!r} is not understood", allowed=_FORMS, remedy=_EXAMPLE)
        return Network(latency_s=parse_duration(parts[0]), bandwidth_bytes_per_s=parse_bandwidth(parts[1]), token=token)


def _parse_shaped(token: str, rest: str) -> Network:
    links, *changes = rest.split("+")
    count, cross, rate = links.partition("x")
    if not cross or not _COUNT.fullmatch(count) or not 2 <= int(count) <= MOST_HOSTS or re.search(r"\s", token):
        raise ConfigError(
            f"network {token!r} is not understood",
            allowed=f"shaped:HOSTSxBANDWIDTH with 2 to {MOST_HOSTS} hosts",
            remedy="write it like shaped:4x200mbit",
        )
    conditions: dict[str, float] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if name not in CONDITIONS:
            raise unknown(f"condition of the network {token}", name, CONDITIONS)
        if not equals or name in conditions:
            raise ConfigError(
                f"network {token!r} has {name} {'twice' if equals else 'without a value'}",
                allowed="each condition once, as NAME=VALUE",
                remedy=f"write it like shaped:{links}+slow-host=50%",
            )
        conditions[name] = CONDITIONS[name](value)
    if "oversubscribed" in conditions and int(count) % 2:
        raise ConfigError(
            f"the {count} hosts of {token} in two halves", allowed="an even number of hosts with oversubscribed"
        )
    network = Network(
        bandwidth_bytes_per_s=parse_bandwidth(rate), token=token, hosts=int(count), conditions=tuple(conditions.items())
    )
    slowest = min(*network.rates_bytes_per_s(), network.bandwidth_bytes_per_s, network.uplink_bytes_per_s)
    if slowest < LEAST_RATE_BYTES_PER_S:
        raise ConfigError(
            f"a link of the network {token} has a rate below 1 mbit",
            allowed="1 mbit or more on every link, with all conditions",
            remedy="raise the rate, or leave a condition out",
        )
    return network


def hosts_of(tokens: Iterable[Any]) -> tuple[Network, ...]:
    """Return the shaped networks among those that one job's ranks are to use; none where there are none.

    Raises ``ConfigError`` where they cannot be one job's: hosts of several numbers, or ranks that are no hosts.
    """
    networks = [Network.parse(str(token)) for token in dict.fromkeys(tokens)]
    shaped = tuple(network for network in networks if network.shaped)
    if shaped and len({network.hosts for network in networks}) > 1:
        raise ConfigError(
            f"the networks {', '.join(network.token for network in networks)} in one run",
            allowed="shaped networks of the same hosts alone, or none: each rank of these is a host of its own",
            remedy="measure them in several runs",
        )
    return shaped
