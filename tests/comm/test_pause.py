"""What a rank does between two looks at messages: spin, yield its core, or sleep until a message is due."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from memory_transport import Mailbox

from dpsim.comm import transport
from dpsim.comm.clock import SLEEP_LEAD_S

NOW_S, NAP_S = 50.0, 1e-4


class Due:
    """A message that is due at a known time, or at an unknown one."""

    def __init__(self, due_s: float | None) -> None:
        self._due_s = due_s

    def done(self) -> bool:
        return False

    def due_s(self) -> float | None:
        return self._due_s


@pytest.mark.parametrize(
    ("due_s", "until_s"),
    [
        ([NOW_S + 1.0], [NOW_S + 1.0 - SLEEP_LEAD_S]),
        ([NOW_S + 1.0, NOW_S + 2.0], [NOW_S + 2.0 - SLEEP_LEAD_S]),
        ([NOW_S + 1.0, None], [NOW_S + NAP_S]),
        ([None], [NOW_S + NAP_S]),
        ([], [NOW_S + NAP_S]),
        ([NOW_S + SLEEP_LEAD_S / 2], []),
        ([NOW_S - 1.0], []),
    ],
)
def test_a_rank_that_sleeps_wakes_before_all_messages_are_due(
    due_s: Sequence[float | None], until_s: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(transport, "now", lambda: NOW_S)
    monkeypatch.setattr(transport, "sleep_until", slept.append)
    end = Mailbox(2, eager=True).ranks[0]
    end.nap_s = NAP_S
    transport.pause(end, [Due(moment_s) for moment_s in due_s])
    assert slept == pytest.approx(until_s)


@pytest.mark.parametrize(("oversubscribed", "yields"), [(True, 1), (False, 0)])
def test_a_rank_that_never_sleeps_yields_only_a_core_that_it_shares(
    oversubscribed: bool, yields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    yielded: list[None] = []
    monkeypatch.setattr(transport.os, "sched_yield", lambda: yielded.append(None))
    end = Mailbox(2, eager=True).ranks[0]
    end.oversubscribed = oversubscribed
    transport.pause(end, [Due(NOW_S)])
    assert len(yielded) == yields
