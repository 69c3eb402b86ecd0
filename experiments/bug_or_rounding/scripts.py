"""The scripts: one ordinary training with DDP or FSDP, and what each case has in place of a part of it.

They stand in ``cases.toml``.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DECLARED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text(encoding="utf-8"))
_INDENTED = {"step": 12, "epoch": 8, "top": 0}
"""Blanks before the lines of a part; 4 before those of any other."""


@dataclass(frozen=True)
class Case:
    """A script by the parts that differ from the ordinary one, and the class that should be named ("" for none)."""

    name: str
    parts: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    design: str = ""

    @property
    def script(self) -> str:
        """The text of the script."""
        parts = _DECLARED["ordinary"] | {
            name: string.Template(text).substitute(_DECLARED["shared"]) for name, text in self.parts.items()
        }
        indented = {name: text.replace("\n", "\n" + " " * _INDENTED.get(name, 4)) for name, text in parts.items()}
        return str(_DECLARED["script"]).format(**indented)


def _cases(verdict: str) -> tuple[Case, ...]:
    """Return the cases of a verdict; with ``fsdp`` a case's layers and model are given to ``fully_shard``."""
    cases = []
    for table in _DECLARED[verdict]:
        texts = {name: table.pop(name) for name in ("name", "kind", "design") if name in table}
        if table.pop("fsdp", False):
            sharded = _DECLARED["sharded"]
            table = sharded | table | {"top": f"{sharded['top']}\n{table.get('top', '')}"}
        cases.append(Case(**texts, parts=table))
    return tuple(cases)


MISTAKES, BY_DESIGN, CLEAN = map(_cases, ("mistake", "by_design", "clean"))
