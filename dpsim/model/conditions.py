"""Prices a shaped network under conditions that nobody calibrated on, from the calibration of the network without them.

Each round of an algorithm lasts as long as its slowest link: the bytes that cross it over the rate that the token gives
it. A collective takes as much longer as the sum of its rounds does.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import Collective, CollectiveKind
from dpsim.comm.message_program import Program, lower
from dpsim.comm.message_steps import step_list
from dpsim.cost_tables import AllreduceCost, OverlapCost
from dpsim.machine import Machine
from dpsim.model.cost import idle_curve, tables_of
from dpsim.model.formulas import lines_of, wire_share
from dpsim.network import Network

Table = TypeVar("Table", AllreduceCost, OverlapCost)
_STANDS_FOR = {"auto": "halving-doubling", "mpi": "halving-doubling", "gloo": "ring", "hierarchical": "ring"}
"""The algorithm whose messages are those of one that does not say: of the MPI library, for long messages."""
_DOUBLING_ERROR = 0.05
"""One standard error, relative, for each doubling of the time that conditions bring about, beside the table's own."""


def on_network(machine: Machine, network: Network) -> Machine:
    """Return the machine as it is on a shaped network with conditions, from its calibration on the plain one.

    A network without conditions, or that is not shaped, changes nothing. Device counts that the network has and no
    table covers get their tables first, as they are scaled: a half of the hosts says nothing of the link between two.
    ``loss`` is not priced.
    """
    if not network.conditions:
        return machine
    known = [*machine.allreduce, *machine.halves]
    of_all = {(table.kind, table.algorithm, table.wire_dtype): table for table in known if table.kind != "send"}
    extra = [
        _scaled(machine, msgspec.structs.replace(table.collective, devices=network.hosts))
        for table in of_all.values()
        if all(other.collective != _with_devices(table, network.hosts) for other in known)
    ]
    changed = [_changed(table, network) for table in (*known, *extra)]
    link = machine.link
    if link is not None:
        slower = _ratio(network, Collective(algorithm="ring", devices=network.hosts))
        link = msgspec.structs.replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower,
            latency_s=link.latency_s + (network.condition("delay") or 0.0),
        )
    return msgspec.structs.replace(
        machine,
        network=network.token,
        allreduce=tuple(table for table in changed if table.kind == "allreduce"),
        halves=tuple(table for table in changed if table.kind != "allreduce"),
        overlap=tuple(_changed(table, network) for table in machine.overlap),
        link=link,
    )


def seconds_a_byte(network: Network, collective: Collective) -> float:
    """Return the least seconds that a collective takes for each byte of its data, by the rates of a shaped network."""
    seconds = 0.0
    for messages in messages_of(collective):
        seconds += max(_link_seconds(network, messages), default=0.0)
    return seconds


def share_on_the_wire(collective: Collective) -> float:
    """Return the bytes in messages for each byte of data that is added up."""
    halved = ALGORITHMS.find(collective.algorithm).sixteen_bit_messages
    return wire_share(collective.wire_dtype) if halved else 1.0


def messages_of(collective: Collective) -> tuple[tuple[tuple[int, int, float], ...], ...]:
    """Return the messages of each round of a collective: (from, to, share of the data)."""
    return _rounds(collective.kind, _STANDS_FOR.get(collective.algorithm, collective.algorithm), collective.devices)


def _with_devices(table: AllreduceCost, devices: int) -> Collective:
    return msgspec.structs.replace(table.collective, devices=devices)


def _scaled(machine: Machine, collective: Collective) -> AllreduceCost:
    """Return a table of what a collective without one costs, at the sizes of the tables that it is scaled from."""
    curve = idle_curve(machine, collective)
    near = min(
        (table for table in tables_of(machine, collective.kind) if table.algorithm == collective.algorithm),
        key=lambda table: abs(math.log2(table.devices / collective.devices)),
    )
    return AllreduceCost(
        **msgspec.structs.asdict(collective),
        sizes_bytes=near.sizes_bytes,
        time_s=tuple(float(np.interp(size, *curve.points)) for size in near.sizes_bytes),
        relative_uncertainty=curve.scaled.error if curve.scaled is not None else near.relative_uncertainty,
    )


def _ratio(network: Network, collective: Collective) -> float:
    """Return how many times as long as on the plain network each byte takes."""
    plain = seconds_a_byte(network.plain, collective)
    return seconds_a_byte(network, collective) / plain if plain > 0 else 1.0


def _changed(table: Table, network: Network) -> Table:
    """Return a table with the times that the conditions of a network make of it.

    The wire takes longer for the bytes. What a collective takes beyond that, for looking, waking and adding, stays.
    """
    ratio = _ratio(network, table.collective)
    rounds = min(line.alpha for line in lines_of(table.collective, table.devices, 1))
    times = np.array(table.time_s)
    on_wire = np.array(table.sizes_bytes, float) * share_on_the_wire(table.collective)
    wire_s = on_wire * seconds_a_byte(network.plain, table.collective)
    slower = times + (ratio - 1) * np.minimum(wire_s, times)
    slower += rounds * (network.condition("delay") or 0.0)
    doubt = math.hypot(table.relative_uncertainty or 0.0, _DOUBLING_ERROR * abs(math.log2(ratio)))
    return msgspec.structs.replace(
        table, time_s=tuple(map(float, slower)), p10_s=(), p90_s=(), relative_uncertainty=doubt
    )


@functools.lru_cache(maxsize=256)
def _rounds(kind: CollectiveKind, algorithm: str, devices: int) -> tuple[tuple[tuple[int, int, float], ...], ...]:
    if kind == "copy" or devices < 2:
        return ()
    if kind == "send":
        return (((0, 1, 1.0),),)
    if kind in ("broadcast", "ordered-sum"):
        return (tuple((0, other, 1.0) for other in range(1, devices)),)
    steps = step_list(kind, algorithm, None, devices)
    programs: list[Program] = [lower(steps, tuple(range(devices)), rank, "none") for rank in range(devices)]
    numbers = max(len(of.rounds) for of in programs)
    return tuple(
        tuple(
            (rank, message.peer, (message.view.stop - message.view.start) / of.units)
            for rank, of in enumerate(programs)
            if number < len(of.rounds)
            for message in of.rounds[number].sends
        )
        for number in range(numbers)
    )


def path(network: Network, sender: int, receiver: int) -> Iterator[tuple[str, int]]:
    """Yield the links that a message from one host to another takes."""
    half = network.hosts // 2
    yield "up", sender
    if (sender < half) != (receiver < half):
        yield "uplink", int(sender < half)
    yield "down", receiver


def rates(network: Network) -> dict[tuple[str, int], tuple[float, float]]:
    """Return for each link of a shaped network its rate, and that of the flow beside on it, in bytes a second."""
    hosts, flow = network.rates_bytes_per_s(), (network.condition("background") or 0.0) * network.rate_bytes_per_s
    of_links = {(link, number): rate for number, rate in enumerate(hosts) for link in ("up", "down")}
    of_links |= {("uplink", half): network.uplink_bytes_per_s for half in (0, 1)}
    taken = {*path(network, 0, 1)}
    return {link: (rate, flow * (link in taken)) for link, rate in of_links.items()}


def _link_seconds(network: Network, messages: tuple[tuple[int, int, float], ...]) -> list[float]:
    """Return the seconds that each link takes for the messages of a round, for a byte of data."""
    loads: dict[tuple[str, int], float] = collections.defaultdict(float)
    for sender, receiver, share in messages:
        for link in path(network, sender, receiver):
            loads[link] += share
    of_links = rates(network)
    return [share / (of_links[link][0] - of_links[link][1]) for link, share in loads.items()]
