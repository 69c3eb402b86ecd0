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
from dpsim.optimizer import AdamW, Optimizer, Sgd
from dpsim.progress import no_progress
from dpsim.records.train import TrainConfig
from dpsim.runtime.update_order import Compute, Pull, Push, UpdateOrder

OnRanks = Callable[..., Any]
STEPS = 12


def case(workers: int, optimizer: Optimizer, model: str = "mlp:16,9,dropout=0.3", staleness: int = 2) -> dict[str, Any]:
    """A training of 25 samples in batches of 10, of which the last is short."""
    plan = {"global_batch": 10, "strategy": f"parameter-server:staleness={staleness}"}
    return {
        "workers": workers,
        "model": model,
        "dataset": "synthetic:6x5x2,classes=3,train=25,test=6",
        "steps": STEPS,
        "plan": plan | {"optimizer": codec.to_builtins(optimizer)},
    }


def order_of(outcome: dict[str, Any]) -> UpdateOrder:
    return codec.decode(outcome["order"], UpdateOrder, "order")


def replay(on_ranks: OnRanks, one: dict[str, Any], outcome: dict[str, Any], devices: int) -> dict[str, Any]:
    result: dict[str, Any] = on_ranks("ranks_asynchronous:replay", one | {"order": outcome["order"]}, devices=devices)
    return result


@pytest.mark.parametrize(
    ("workers", "optimizer", "model"),
    [(1, Sgd(weight_decay=0.01), "mlp:16,9"), (2, AdamW(), "cnn:3,4,norm=group"), (3, Sgd(), "mlp:16,9,dropout=0.3")],
)
def test_a_replay_on_any_number_of_ranks_ends_in_the_same_bits(
    on_ranks: OnRanks, workers: int, optimizer: Optimizer, model: str
) -> None:
    one = case(workers, optimizer, model)
    outcome = on_ranks("ranks_asynchronous:train", one, devices=workers, outlives=True)
    order = order_of(outcome)
    assert all(sorted(shard) == list(range(STEPS * workers)) for shard in order.orders) and len(order.orders) == workers
    for devices in (1, 2, 3):
        again = replay(on_ranks, one, outcome, devices)
        assert (again["digest"], again["losses"]) == (outcome["result"]["digest"], outcome["result"]["losses"])


def test_another_order_ends_in_other_bits(on_ranks: OnRanks) -> None:
    one = case(2, Sgd())
    outcome = on_ranks("ranks_asynchronous:train", one, devices=2, outlives=True)
    updates = STEPS * 2
    in_turn = UpdateOrder(
        takers=(0,) * updates, pulls=tuple((k, k) for k in range(updates)), orders=(tuple(range(updates)),) * 2
    )
    assert in_turn.staleness == {0: 2 * updates} and order_of(outcome) != in_turn
    changed = {"order": codec.to_builtins(in_turn)}
    digests = {replay(on_ranks, one, each, 1)["digest"] for each in (outcome, changed)}
    assert len(digests) == 2 or order_of(outcome).staleness == in_turn.staleness


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_update_is_staler_than_the_bound_allows(on_ranks: OnRanks, staleness: int) -> None:
    """Between a pull and the push another worker makes 2 ``staleness`` + 1 updates at most."""
    outcome = on_ranks("ranks_asynchronous:train", case(3, Sgd(), staleness=staleness), devices=3, outlives=True)
    assert max(order_of(outcome).staleness) <= 2 * (2 * staleness + 1)
    made = [0, 0, 0]
    for ticket in order_of(outcome).orders[0]:
        made[order_of(outcome).takers[ticket]] += 1
        assert max(made) - min(made) <= staleness + 1 or sum(made) > STEPS * 3 - 3 * (staleness + 2)


def runs(process: int) -> bool:
    """Whether a process has not ended; one that has may wait for whoever collects it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("dies", [(1,), (0,), (0, 2)])
def test_the_others_go_on_when_workers_die(
    on_ranks: OnRanks, capfd: pytest.CaptureFixture[str], dies: tuple[int, ...]
) -> None:
    one = case(3, Sgd())
    outcome = on_ranks("ranks_asynchronous:train", one | {"dies": dies}, devices=3, outlives=True)
    order = order_of(outcome)
    assert outcome["by"] == min({0, 1, 2} - {*dies})
    assert sorted(map(len, order.orders)) == [STEPS * 3 - len(dies)] * 3
    said = capfd.readouterr().err
    assert all(said.count(f"worker {rank} (process ") == (rank in dies) for rank in range(3)), said
    assert replay(on_ranks, one, outcome, 2)["digest"] == outcome["result"]["digest"]
    assert not [*filter(runs, outcome["processes"])]


@pytest.mark.parametrize("fatal", [{"dies": (0, 1)}, {"dies_early": 1}])
def test_a_job_ends_when_all_workers_die_or_one_before_the_start(on_ranks: OnRanks, fatal: dict[str, Any]) -> None:
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        on_ranks("ranks_asynchronous:train", case(2, Sgd()) | fatal, devices=2, outlives=True)


def test_an_order_is_replayed_so_that_each_step_finds_what_it_needs() -> None:
    """Update 1 is computed from version 0, as update 0 is; its worker died before it reached the second shard."""
    order = UpdateOrder(takers=(0, 1, 0), pulls=((0, 0), (0, 0), (2, 1)), orders=((0, 1, 2), (0, 2)))
    index = {(type(step), step): number for number, step in enumerate(order.steps())}

    def before(first: Pull | Compute | Push, second: Pull | Compute | Push) -> bool:
        return index[type(first), first] < index[type(second), second]

    assert before(Pull(1, 0), Push(0, 0)) and before(Compute(1), Push(1, 0)) and before(Push(1, 0), Pull(2, 0))
    assert len(index) == 6 + 3 + 5
    assert order.staleness == {0: 4, 1: 1}


@pytest.mark.parametrize(
    "broken",
    [
        {"takers": (0, 0), "pulls": ((0,),), "orders": ((0, 1),)},
        {"takers": (0,), "pulls": ((0,),), "orders": ((0, 0),)},
        {"takers": (0,), "pulls": ((0,),), "orders": ((1,),)},
    ],
)
def test_an_order_that_does_not_fit_together_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not fit together"):
        UpdateOrder(**broken)


def test_an_order_in_which_updates_need_each_other_is_refused() -> None:
    order = UpdateOrder(takers=(0, 1), pulls=((1, 0), (0, 1)), orders=((1, 0), (0, 1)))
    with pytest.raises(ConfigError, match="needs another that needs it"):
        list(order.steps())


def test_a_recorded_order_is_replayed_from_its_file(tmp_path: Path) -> None:
    record = tmp_path / "order.json"
    given = {"model": "mlp:8", "dataset": "synthetic:4x4x1,classes=3,train=40,test=10", "steps": 6, "global_batch": 8}
    config = TrainConfig.of(**given, devices=2, strategy="parameter-server", record=str(record))
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
