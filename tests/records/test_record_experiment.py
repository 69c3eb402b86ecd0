"""A declared experiment: what cannot be run is refused where it is declared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, FileFormatError
from dpsim.harness.sweep.questions import completed
from dpsim.optimizer import AdamW, Optimizer, Sgd
from dpsim.records.sweep import EXPERIMENT_SCHEMA, Experiment, read_experiment

MISTAKES: list[tuple[str, Any, str]] = [
    ("name", "../elsewhere", "named '../elsewhere'"),
    ("name", "", "named ''"),
    ("budget_s", math.nan, "budget_s is nan"),
    ("budget_s", -1.0, "budget_s is -1"),
    ("interval", math.nan, "interval is nan"),
    ("interval", 0.0, "interval is 0"),
]


@pytest.mark.parametrize(("key", "value", "message"), MISTAKES)
def test_a_value_that_means_nothing_is_refused_in_a_file_and_from_a_flag(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "experiment.toml"
    written = repr(list(value)) if isinstance(value, tuple) else repr(value).replace("'", '"')
    path.write_text(f'schema = "{EXPERIMENT_SCHEMA}"\n{key} = {written}\n', encoding="utf-8")
    with pytest.raises(FileFormatError) as in_a_file:
        read_experiment(path)
    with pytest.raises(ConfigError) as from_a_flag:
        msgspec.structs.replace(Experiment(), **{key: value})
    assert message in str(in_a_file.value) and str(path) in str(in_a_file.value)
    assert message in str(from_a_flag.value)


def test_a_sweep_on_one_device_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one count above 1"):
        completed(Experiment(question="devices", base={"devices": 1, "global_batch": 64}))


def test_a_digest_survives_a_field_that_a_later_version_adds() -> None:
    class Before(Noun, frozen=True):
        size: int = 1
        optimizers: tuple[Optimizer, ...] = (Sgd(), AdamW(learning_rate=0.5))

    class After(Before, frozen=True):
        added: float = math.inf

    assert codec.digest(After(size=2)) == codec.digest(Before(size=2)) != codec.digest(Before())
    assert codec.digest(After(added=3.0)) != codec.digest(After())
    swapped = (AdamW(), Sgd(learning_rate=0.5))
    assert codec.digest(Before(optimizers=swapped)) != codec.digest(Before())
