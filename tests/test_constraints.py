"""The table of impossible combinations: what a plan refuses, and what is asked of some of its fields."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dpsim.constraints import CONSTRAINTS, check, possible
from dpsim.errors import ConfigError
from dpsim.plan import Plan

PLAIN: dict[str, Any] = {"devices": 2, "global_batch": 64}
IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"algorithm": "hierarchical"},
    {"wire_dtype": "bfloat16", "algorithm": "ring"},
    {"accumulate": 40},
    {"leaves": 8, "devices": 4, "accumulate": 4, "batch_norm": "leaf"},
    {"leaves": 8},
    {"batch_norm": "leaf"},
    {"batch_norm": "global", "fusion_rule": "horovod", "overlap": "inline"},
    {"batch_norm": "global", "accumulate": 2},
    {"strategy": "zero1", "algorithm": "ring", "fusion_rule": "horovod"},
    {"strategy": "zero1", "algorithm": "one-shot"},
    {"strategy": "zero1", "algorithm": "direct", "wire_dtype": "float16"},
    {"fusion_rule": "one", "fusion_threshold_bytes": 0.0},
)


@pytest.mark.parametrize(("row", "given"), [*zip(CONSTRAINTS, IMPOSSIBLE, strict=True)])
def test_a_plan_is_refused_with_the_words_of_its_row(row: Any, given: dict[str, Any]) -> None:
    defaults = {name: getattr(Plan(**PLAIN), name) for name in row.fields.split()}
    values = defaults | {name: value for name, value in (PLAIN | given).items() if name in defaults}
    with pytest.raises(ConfigError) as refused:
        check(**values)
    with pytest.raises(ConfigError, match=re.escape(refused.value.given)):
        Plan(**(PLAIN | given))
    assert "{" not in str(refused.value) and refused.value.allowed and refused.value.remedy
    assert all(not possible(name, **values) for name in row.fields.split())


def test_constraints_of_fields_that_are_not_given_do_not_count() -> None:
    check(algorithm="hierarchical", devices=2)
    check(strategy="zero1", wire_dtype="float32")
    assert possible("algorithm", algorithm="hierarchical", devices=4, layout="2x2")
    assert not possible("algorithm", algorithm="hierarchical", devices=4, layout="")
    assert possible("strategy", algorithm="hierarchical", devices=4, layout="")
