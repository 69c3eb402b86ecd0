"""Groups of ranks that communicate at the same time, and collectives of all kinds that are waited for one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory_transport import Mailbox

from dpsim.comm.progress import progress

OnRanks = Callable[..., Any]


def test_groups_run_all_collectives_at_once_while_messages_go_around(together: OnRanks) -> None:
    sizes, networks = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 4)), ["node", "paced:50us,1gbit"]
    tasks = [("ranks_groups:groups", {"networks": networks, "of_a_group": of_a_group}, n) for n, of_a_group in sizes]
    assert dict(zip(sizes, together(*tasks), strict=True)) == {size: [] for size in sizes}


def test_transports_of_one_rank_share_its_emulated_link(on_ranks: OnRanks) -> None:
    argument = {"network": "paced:1ms,80mbit", "size_bytes": 100_000}  # 10 ms a message
    actual = on_ranks("ranks_groups:two_transports", argument, devices=2)
    assert actual["shared_s"] >= 1e-3 + 2 * 10e-3 > actual["first_s"] >= 1e-3 + 10e-3


@pytest.mark.parametrize("overlap", ["poll", "thread"])
def test_what_is_left_goes_on_after_one_collective_was_waited_for(overlap: str) -> None:
    box, done = Mailbox(2, eager=True), [[], []]  # type: ignore[var-annotated]
    two = [progress(box.ranks[r], "ring", overlap, lambda *what, r=r: done[r].append(what)) for r in range(2)]
    data = [[np.full(9, 1.0 + rank, np.float32) for _ in range(3)] for rank in range(2)]
    for rank, mechanism in enumerate(two):
        for bucket, mine in enumerate(data[rank]):
            mechanism.submit(bucket, mechanism.prepare(mine))
    other = threading.Thread(target=two[1].finish_until, args=(3,))
    other.start()
    two[0].finish_until(1)
    assert done[0] and (data[0][0] == 3.0).all()
    until = threading.Event()
    while len(done[0]) < 3 and not until.wait(0.001):
        two[0].poll()
    other.join()
    for mechanism in two:
        mechanism.finish_until(3)
        mechanism.finish()
        mechanism.close()
    assert [[what[0] for what in each] for each in done] == [[0, 1, 2]] * 2
    assert all((mine == 3.0).all() for of_rank in data for mine in of_rank)
