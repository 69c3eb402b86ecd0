"""DDP with dpsim's communication hook has the gradients of DDP with gloo, on ranks that MPI did not start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parents[1] / "support" / "train_with_hook.py"
TIMEOUT_S = 300
EPSILON = {"float64": 2.0**-50, "bfloat16": 2.0**-6}
"""What rounding explains, of the largest gradient of a tensor; where it is not named, that of float32."""


def started(size: int, what: str, folder: Path) -> list[subprocess.Popen[str]]:
    command = [sys.executable, str(SCRIPT)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "store"), what, str(folder / f"{rank}.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def outcomes(size: int, what: str, folder: Path) -> list[dict[str, Any]]:
    """What every rank wrote. Memory that PyTorch or dpsim shares leaves no name behind."""
    processes = started(size, what, folder)
    for process in processes:
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
        assert not list(Path("/dev/shm").glob(f"torch_{process.pid}_*"))
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    assert not any(each.pop("mpi") for each in found), "no MPI library was loaded"
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_those_of_gloo(size: int, tmp_path: Path) -> None:
    for of_rank in outcomes(size, "compare", tmp_path):
        for case, difference in of_rank.items():
            limit = EPSILON.get(case.partition(",")[0], 2.0**-20)
            assert difference <= limit, case
        if size == 2:
            assert of_rank["float32, inline"] == of_rank["float32, thread"] == 0, "half a sum is exact"


def test_16_bits_on_the_wire_round_the_gradients(tmp_path: Path) -> None:
    for of_rank in outcomes(2, "rounded", tmp_path):
        assert 2.0**-12 < of_rank["bfloat16"] < 2.0**-6
        assert 2.0**-15 < of_rank["float16"] < 2.0**-9


def test_all_ranks_try_every_way_and_stay_with_the_same_one(tmp_path: Path) -> None:
    first, second = (of_rank["ways"] for of_rank in outcomes(2, "decided", tmp_path))
    assert first == second and {*first} == {"inline", "thread", "gloo"}
    assert len({*first[-40:]}) == 1


def test_sparse_gradients_are_left_to_gloo(tmp_path: Path) -> None:
    assert all(of_rank["difference"] < 1e-6 for of_rank in outcomes(2, "sparse", tmp_path))


def test_a_rank_that_has_ended_is_named_by_those_that_wait_for_it(tmp_path: Path) -> None:
    waiting, ended = started(2, "killed", tmp_path)
    output, _ = waiting.communicate(timeout=TIMEOUT_S)
    ended.communicate(timeout=TIMEOUT_S)
    assert ended.returncode == 9 and waiting.returncode == 1
    assert "rank 1 has ended while rank 0 waits for its gradients" in output
    assert not [name for each in (waiting, ended) for name in Path("/dev/shm").glob(f"torch_{each.pid}_*")]


def test_a_rank_that_joins_early_is_refused(tmp_path: Path) -> None:
    output = [process.communicate(timeout=TIMEOUT_S)[0] for process in reversed(started(2, "joined", tmp_path))]
    assert "a rank that has trained fewer batches than others" in output[0]
    assert "rank 1 has ended while rank 0 waits for its gradients" in output[1]


def test_what_a_hook_cannot_do_is_refused() -> None:
    import dpsim.torch
    from dpsim.errors import ConfigError

    with pytest.raises(ConfigError, match=r"wire_dtype 'int8'[\s\S]*float16, bfloat16"):
        dpsim.torch.allreduce_hook(wire_dtype="int8")
    with pytest.raises(ConfigError, match=r"overlap 'off'[\s\S]*auto, inline, thread, gloo"):
        dpsim.torch.allreduce_hook(overlap="off")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"before torch.distributed.init_process_group"):
        dpsim.torch.allreduce_hook()
