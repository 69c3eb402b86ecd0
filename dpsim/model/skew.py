"""How much communication ranks hide from each other where the links of a shaped network are not alike.

Ranks keep no common time there. One that has all its sums computes while a slow link still carries what it sent before
to its neighbour, and the queue of a link that a flow uses too empties meanwhile. A step is then shorter than its
computation and its rounds one after another, of which each lasts as long as its slowest link.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from dpsim.collective import Collective
from dpsim.model.conditions import messages_of, path, rates, seconds_a_byte, share_on_the_wire
from dpsim.network import Network
from dpsim.schedule import Schedule
from dpsim.strategy import DataParallel

_UNEVEN = {"slow-host", "background", "oversubscribed"}
"""The conditions under which links are not alike."""
_STEPS = 8
"""Steps in a row; of the second half of them the mean is taken."""


def hidden_s(network: Network, schedule: Schedule, computation_s: float) -> float:
    """Return the seconds of communication that a step hides, at most, on a shaped network with conditions.

    ``computation_s`` are those of everything else in the step. It is 0 where all links are alike, and for steps of
    which the computation is not followed by the allreduces of one buffer after another.
    """
    plan = schedule.plan
    conditions = {name for name, _ in network.conditions}
    if not conditions & _UNEVEN or (plan.overlap, plan.strategy, plan.leaves) != ("off", DataParallel.name, 0):
        return 0.0
    collective = plan.collective
    sizes = schedule.summed_bytes * share_on_the_wire(collective)
    in_turn_s = computation_s + float(sizes.sum()) * seconds_a_byte(network, collective)
    return max(0.0, in_turn_s - _period_s(network, collective, tuple(sizes.tolist()), computation_s))


@functools.lru_cache(maxsize=1024)
def _period_s(network: Network, collective: Collective, sizes: Sequence[float], computation_s: float) -> float:
    """Return the seconds from step to step, once the ranks are as far apart as they get.

    A rank sends as soon as it has what it got in the round before; a message is at its receiver when the slowest link
    of its path has sent all that was queued there before it.
    """
    of_links = rates(network)
    queued = dict.fromkeys(of_links, (0.0, 0.0))  # when the last message came, and the bytes of the queue then

    def sent_at(link: tuple[str, int], now_s: float, size: float) -> float:
        rate, flow = of_links[link]
        if math.isinf(rate):
            return now_s
        last_s, waiting = queued[link]
        waiting = max(0.0, waiting - (rate - flow) * max(0.0, now_s - last_s))
        queued[link] = max(now_s, last_s), waiting + size
        return now_s + (waiting + size) / rate

    at_s, ends_s = [0.0] * collective.devices, list[float]()
    for _ in range(_STEPS):
        at_s = [rank_s + computation_s for rank_s in at_s]
        for size in sizes:
            for messages in messages_of(collective):
                begun_s, at_s = at_s, [*at_s]
                for sender, receiver, share in sorted(messages, key=lambda message: begun_s[message[0]]):
                    now_s = begun_s[sender]
                    received_s = max(sent_at(link, now_s, share * size) for link in path(network, sender, receiver))
                    at_s[receiver] = max(at_s[receiver], received_s)
        ends_s.append(max(at_s))
    half = _STEPS // 2
    return (ends_s[-1] - ends_s[half - 1]) / (_STEPS - half)
