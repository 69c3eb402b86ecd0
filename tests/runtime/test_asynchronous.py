"""Asynchronous training: replays end in the same bits, the bound holds, and the death of a worker ends no job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.harness.train.train import train
from dpsim.harness.train.updates import replayed
from dpsim.launch.jobs import JobFailed
from dpsim.optimizer import AdamW, Lars, Optimizer, Sgd
from dpsim.progress import no_progress
from dpsim.records.train import TrainConfig
from dpsim.runtime.asynchronous.update_order import Compute, Pull, Push, UpdateOrder

OnRanks = Callable[..., Any]
Together = Callable[..., list[Any]]
STEPS = 12
STRATEGIES = ("parameter-server:staleness=2", "gossip:staleness=2")
PLAIN = Sgd(momentum=0.0)


def case(
    workers: int, optimizer: Optimizer, model: str = "mlp:16,9,dropout=0.3", strategy: str = STRATEGIES[0]
) -> dict[str, Any]:
    """A training of 25 samples in batches of 10, of which the last is short."""
    plan = {"global_batch": 10, "strategy": strategy}
    return {
        "workers": workers,
        "model": model,
        "dataset": "synthetic:6x5x2,classes=3,train=25,test=6",
        "steps": STEPS,
        "plan": plan | {"optimizer": codec.to_builtins(optimizer)},
    }


def order_of(outcome: dict[str, Any]) -> UpdateOrder:
    return codec.decode(outcome["order"], UpdateOrder, "order")


def replays(
    together: Together, one: dict[str, Any], *orders: UpdateOrder, devices: tuple[int, ...] = (1,)
) -> list[dict[str, Any]]:
    """The results of replays of each order on each number of devices."""
    arguments = [one | {"order": codec.to_builtins(order)} for order in orders]
    return together(*(("ranks_asynchronous:replay", each, n) for each in arguments for n in devices))


@pytest.mark.parametrize(
    ("workers", "optimizer", "model", "strategy", "changed"),
    [
        (1, Sgd(weight_decay=0.01), "mlp:16,9", STRATEGIES[0], 1),
        (2, AdamW(), "cnn:3,4,norm=group", STRATEGIES[0], 2),
        (3, Sgd(), "mlp:16,9,dropout=0.3", STRATEGIES[0], 3),
        (1, AdamW(), "mlp:16,9", "gossip", 1),
        (2, AdamW(), "cnn:3,4,norm=group", "gossip:staleness=0", 2),
        (3, Sgd(weight_decay=0.01), "mlp:16,9,dropout=0.3", "gossip", 2),
        (4, AdamW(), "mlp:16,9", "gossip:peers=2", 3),
    ],
)
def test_a_replay_on_any_number_of_ranks_ends_in_the_same_bits(
    on_ranks: OnRanks,
    together: Together,
    workers: int,
    optimizer: Optimizer,
    model: str,
    strategy: str,
    changed: int,
) -> None:
    """Each update has ``changed`` so many cells."""
    one = case(workers, optimizer, model, strategy)
    outcome = on_ranks("ranks_asynchronous:train", one, devices=workers, outlives=True)
    order = order_of(outcome)
    assert len(order.orders) == workers
    assert all(sum(ticket in cell for cell in order.orders) == changed for ticket in range(STEPS * workers))
    for again in replays(together, one, order, devices=(1, 2, 3)):
        for name in ("digest", "losses", "mean_staleness", "consensus_distance", "test_loss"):
            assert again[name] == outcome["result"][name], name


def in_turn(updates: int, staleness: int = 0) -> UpdateOrder:
    """Two shards that are updated one after the other, by gradients that are so many updates old."""
    return UpdateOrder(
        takers=(0,) * updates,
        pulls=tuple((max(ticket - staleness, 0),) * 2 for ticket in range(updates)),
        orders=(tuple(range(updates)),) * 2,
    )


def in_pairs(updates: int, met: int) -> UpdateOrder:
    """Three copies, of which the first alone gets gradients and meets the second, and once (update ``met``) the third.

    It is the last update but one of its own that it is averaged in.
    """
    rest = tuple(ticket for ticket in range(updates) if ticket != met)
    return UpdateOrder(
        takers=(0,) * updates,
        pulls=tuple((ticket, -1, -1) for ticket in range(updates)),
        orders=(tuple(range(updates)), rest, (met,)),
    )


@pytest.mark.parametrize(
    ("workers", "strategy", "orders"),
    [(2, STRATEGIES[0], [in_turn(24), in_turn(24, 1)]), (3, STRATEGIES[1], [in_pairs(36, 3), in_pairs(36, 4)])],
)
def test_another_order_ends_in_other_bits(
    together: Together, workers: int, strategy: str, orders: list[UpdateOrder]
) -> None:
    results = replays(together, case(workers, Sgd(), strategy=strategy), *orders, orders[0])
    digests = [result["digest"] for result in results]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(("strategy", "order"), [(STRATEGIES[1], in_turn(24)), (STRATEGIES[0], in_pairs(36, 3))])
def test_an_order_of_another_strategy_is_refused(together: Together, strategy: str, order: UpdateOrder) -> None:
    one = case(len(order.orders), Sgd(), strategy=strategy)
    with pytest.raises(ConfigError, match="an order of updates that strategy"):
        replays(together, one, order)


def test_gossip_with_all_others_is_training_of_one_copy(together: Together) -> None:
    """n copies that are averaged after each update move as one copy does by 1/n of the update, but for rounding."""
    updates, pulls = STEPS * 3, [[-1] * 3 for _ in range(STEPS * 3)]
    for ticket, row in enumerate(pulls):
        row[ticket % 3] = ticket
    all_meet = UpdateOrder(
        takers=tuple(ticket % 3 for ticket in range(updates)),
        pulls=tuple(map(tuple, pulls)),
        orders=(tuple(range(updates)),) * 3,
    )
    one_copy = UpdateOrder(takers=(0,) * updates, pulls=tuple((k,) * 3 for k in range(updates)), orders=all_meet.orders)
    (gossip,), (server,) = (
        replays(together, case(3, PLAIN, strategy=strategy), order, devices=(2,))
        for strategy, order in (("gossip:peers=2", all_meet), ("parameter-server", one_copy))
    )
    assert gossip["losses"] == pytest.approx(server["losses"], rel=1e-4) and gossip["losses"][0] != gossip["losses"][-1]
    assert gossip["consensus_distance"] > 0 == server["consensus_distance"] and gossip["mean_staleness"] == 0


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("strategy", ["parameter-server", "gossip"])
def test_no_update_is_staler_than_the_bound_allows(on_ranks: OnRanks, strategy: str, staleness: int) -> None:
    """Between a pull and the push another worker makes 2 ``staleness`` + 1 updates at most."""
    one = case(3, Sgd(), strategy=f"{strategy}:staleness={staleness}")
    order = order_of(on_ranks("ranks_asynchronous:train", one, devices=3, outlives=True))
    assert max(order.staleness) <= 2 * (2 * staleness + 1)
    if strategy == "parameter-server":
        made = [0, 0, 0]
        for ticket in order.orders[0]:
            made[order.takers[ticket]] += 1
            assert max(made) - min(made) <= staleness + 1 or sum(made) > STEPS * 3 - 3 * (staleness + 2)


def runs(process: int) -> bool:
    """Whether a process has not ended; one that has may wait for whoever collects it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("strategy", "dies", "where"),
    [
        (STRATEGIES[0], (1,), "computes"),
        (STRATEGIES[0], (0,), "has written"),
        (STRATEGIES[0], (0, 2), "counts"),
        (STRATEGIES[1], (1,), "computes"),
        (STRATEGIES[1], (0,), "has written"),
        (STRATEGIES[1], (2,), "counts"),
        ("gossip:staleness=2,peers=2", (0, 2), "counts"),
    ],
)
def test_the_others_go_on_when_workers_die(
    on_ranks: OnRanks,
    together: Together,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
    dies: tuple[int, ...],
    where: str,
) -> None:
    """A worker dies while it computes, when it has written new versions, or when these count and are not counted."""
    one = case(3, Sgd(), strategy=strategy)
    outcome = on_ranks("ranks_asynchronous:train", one | {"dies": dies, "where": where}, devices=3, outlives=True)
    order = order_of(outcome)
    assert outcome["by"] == min({0, 1, 2} - {*dies}) and order.gone == dies
    unfinished = {ticket for ticket in range(STEPS * 3) if not any(ticket in cell for cell in order.orders)}
    assert len(unfinished) == (0 if where == "counts" else len(dies))
    if where == "computes" and strategy == STRATEGIES[0]:
        assert sorted(map(len, order.orders)) == [STEPS * 3 - len(dies)] * 3
    said = capfd.readouterr().err
    assert all(said.count(f"worker {rank} (process ") == (rank in dies) for rank in range(3)), said
    (again,) = replays(together, one, order)
    assert again["digest"] == outcome["result"]["digest"]
    assert not [*filter(runs, outcome["processes"])]


@pytest.mark.parametrize("fatal", [{"dies": (0, 1)}, {"dies_early": 1}])
def test_a_job_ends_when_all_workers_die_or_one_before_the_start(on_ranks: OnRanks, fatal: dict[str, Any]) -> None:
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        on_ranks("ranks_asynchronous:train", case(2, Sgd()) | {"where": "computes"} | fatal, devices=2, outlives=True)


def test_an_order_is_replayed_so_that_each_step_finds_what_it_needs() -> None:
    """Update 1 is computed from version 0, as update 0 is; its worker died before it reached the second cell."""
    order = UpdateOrder(takers=(0, 1, 0), pulls=((0, 0), (0, 0), (2, 1)), orders=((0, 1, 2), (0, 2)))
    index = {(type(step), step): number for number, step in enumerate(order.steps())}

    def before(first: Pull | Compute | Push, second: Pull | Compute | Push) -> bool:
        return index[type(first), first] < index[type(second), second]

    assert before(Pull(1, 0), Push(0, (0,))) and before(Compute(1), Push(1, (0,)))
    assert before(Push(1, (0,)), Pull(2, 0))
    assert len(index) == 6 + 3 + 5
    assert order.staleness == {0: 4, 1: 1}


def test_copies_are_averaged_when_both_have_come_so_far() -> None:
    """Update 1 of the second copy is averaged with the first one's version 1, and was pulled before update 0 met it."""
    order = UpdateOrder(takers=(0, 1, 0), pulls=((0, -1), (-1, 0), (2, -1)), orders=((0, 1, 2), (0, 1)))
    assert list(order.steps()) == [
        Pull(0, 0),
        Compute(0),
        Pull(1, 1),
        Compute(1),
        Push(0, (0, 1)),
        Push(1, (1, 0)),
        Pull(2, 0),
        Compute(2),
        Push(2, (0,)),
    ]
    assert (order.staleness, order.made, order.mean_staleness) == ({0: 2, 1: 1}, [2, 1], pytest.approx(1 / 3))


@pytest.mark.parametrize(
    "broken",
    [
        {"takers": (0, 0), "pulls": ((0,),), "orders": ((0, 1),)},
        {"takers": (0,), "pulls": ((0,),), "orders": ((0, 0),)},
        {"takers": (0,), "pulls": ((0,),), "orders": ((1,),)},
        {"takers": (0,), "pulls": ((0,),), "orders": ((0,),), "gone": (0,)},
    ],
)
def test_an_order_that_does_not_fit_together_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not fit together"):
        UpdateOrder(**broken)


def test_an_order_in_which_updates_need_each_other_is_refused() -> None:
    order = UpdateOrder(takers=(0, 1), pulls=((1, 0), (0, 1)), orders=((1, 0), (0, 1)))
    with pytest.raises(ConfigError, match="needs another that needs it"):
        list(order.steps())


@pytest.mark.parametrize("strategy", ["parameter-server", "gossip"])
def test_a_recorded_order_is_replayed_from_its_file(tmp_path: Path, strategy: str) -> None:
    record = tmp_path / "order.json"
    given = {"model": "mlp:8", "dataset": "synthetic:4x4x1,classes=3,train=40,test=10", "steps": 6, "global_batch": 8}
    config = TrainConfig.of(**given, devices=2, strategy=strategy, record=str(record))
    trained = train(config, no_progress)
    for devices in (1, 3):
        again = train(replayed({"replay": str(record), "devices": devices}), no_progress)
        assert (again.digest, again.losses) == (trained.digest, trained.losses)
    with pytest.raises(ConfigError, match="a replay with another seed"):
        replayed({"replay": str(record), "seed": 3})
    record.write_text("{}", encoding="utf-8")
    with pytest.raises(FileFormatError, match="update order"):
        replayed({"replay": str(record)})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"record": "file"}, "the order of updates of strategy data-parallel"),
        ({"strategy": "gossip:peers=0"}, "gossip with peers=0"),
        ({"strategy": "gossip", "optimizer": Lars()}, "gossip with LARS"),
        ({"strategy": "parameter-server", "record": "a", "replay": "b"}, "a record of a run that replays"),
        ({"strategy": "parameter-server", "checkpoint": "folder"}, "parameter-server with checkpoint"),
        ({"strategy": "parameter-server", "network": "paced:1us,1gbit"}, "share parameters in memory"),
    ],
)
def test_what_asynchronous_training_cannot_do_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainConfig.of(devices=2, **fields)


def test_a_model_with_running_statistics_is_refused(on_ranks: OnRanks) -> None:
    with pytest.raises(ConfigError, match="running statistics"):
        on_ranks("ranks_asynchronous:train", case(2, Sgd(), "cnn:3,4"), devices=2, outlives=True)
