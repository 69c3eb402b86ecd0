"""``python -m dpsim.experiments.bug_or_rounding`` lets scripts train on 1 and 2 devices, and asks what differs.

Twenty-nine have a planted mistake, which should be found and named; five differ by design, which is to be named and is
no mistake; thirty-one are clean. Thirteen shard by FSDP, the others train with DDP. ``--only WORDS`` runs those whose
names have these words; ``--devices 1,2,4`` others; ``--python`` names the Python of another environment, which needs
PyTorch alone. With ``--in-16-bits`` all of them compute in bfloat16, and six more have mistakes that only 16 bits have,
or not. With ``--accumulate 1,2,4`` scripts accumulate over so many micro-batches, six of them wrongly. The scripts
stand in ``bug_or_rounding.toml``: one ordinary training with DDP or FSDP, and what each case has in place of a part.
"""

from __future__ import annotations

import string
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpsim.errors import DpsimError
from dpsim.experiments import command
from dpsim.harness.reproduce.script import ScriptComparison, compare
from dpsim.harness.reproduce.script_verdict import Verdict
from dpsim.torch.script.probe.reproduce.report import MICRO_BATCHES
from dpsim.torch.script.reproduce.rounding import ALLOWANCE

_DECLARED: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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

    @property
    def arguments(self) -> tuple[str, ...]:
        """The script's arguments: its number of micro-batches, where it takes one."""
        return (MICRO_BATCHES,) if "sys.argv" in self.script else ()


def _cases(verdict: str) -> tuple[Case, ...]:
    """Return the cases of a verdict; with ``fsdp`` a case's layers and model are given to ``fully_shard``."""
    cases = []
    for table in _DECLARED[verdict]:
        texts = {name: table.pop(name) for name in ("name", "kind", "design") if name in table}
        shards = table.pop("fsdp", False)
        table = (_DECLARED["accumulating"] if verdict.startswith("accumulating") else {}) | table
        cases.append(Case(**texts, parts=sharded_parts(table) if shards else table))
    return tuple(cases)


def sharded_parts(parts: Mapping[str, str]) -> dict[str, str]:
    """Return the parts of a script whose layers and model are given to ``fully_shard``."""
    sharded: dict[str, str] = _DECLARED["sharded"]
    return sharded | dict(parts) | {"top": f"{sharded['top']}\n{parts.get('top', '')}"}


MISTAKES, BY_DESIGN, CLEAN = map(_cases, ("mistake", "by_design", "clean"))
NARROW_MISTAKES, NARROW_CLEAN = map(_cases, ("narrow_mistake", "narrow_clean"))
"""What only scripts that compute in 16 bits can have, and their corrections."""
ACCUMULATING_MISTAKES, ACCUMULATING_CLEAN = map(_cases, ("accumulating_mistake", "accumulating_clean"))
"""What only scripts that accumulate can have, and their corrections."""


def narrow(case: Case) -> Case:
    """Return the case with all that it computes under autocast to bfloat16, and a policy for its shards."""
    added = _DECLARED["narrow"]
    top = f"{case.parts.get('top', '')}\n{added['top']}"
    return replace(case, parts={**case.parts, "bits": added["bits"], "top": top})


def main() -> int:
    """Run the cases and print a line for each, and the counts."""
    options = command.parser("bug_or_rounding", __doc__)
    options.add_argument("--only", default="", help="run the cases whose names contain this")
    options.add_argument("--devices", default="1,2", help="numbers of devices (1,2)")
    options.add_argument("--in-16-bits", action="store_true", help="run them in bfloat16, and those of 16 bits alone")
    options.add_argument("--accumulate", help="run those that accumulate, over so many micro-batches, such as 1,2,4")
    options.add_argument("--python", help="the Python that the scripts run with, as dpsim reproduce has it")
    given = options.parse_args()
    axes: dict[str, Any] = {"devices": tuple(map(int, given.devices.split(",")))}
    groups: tuple[tuple[Case, ...], ...] = (MISTAKES, BY_DESIGN, CLEAN, (), ())
    if given.in_16_bits:
        groups = (*(tuple(map(narrow, cases)) for cases in groups[:3]), NARROW_MISTAKES, NARROW_CLEAN)
    if given.accumulate is not None:
        axes = {"devices": (2,), "accumulates": tuple(map(int, given.accumulate.split(",")))}
        groups = (ACCUMULATING_MISTAKES, (), ACCUMULATING_CLEAN, (), ())
    found, designs, clean, narrow_found, narrow_clean = (
        [_judged(case, axes, given.python) for case in cases if given.only in case.name] for cases in groups
    )
    for words, judged in (("planted mistakes", found), ("mistakes that only 16 bits have", narrow_found)):
        print(f"{words}: {len(judged)}, found {sum(_alarm(each) for each, _ in judged)}, named {_right(judged)}")
    print(f"by design: {len(designs)}, named {_right(designs)}, alarms {sum(_alarm(each) for each, _ in designs)}")
    print(f"clean scripts: {len(clean) + len(narrow_clean)}, not rounding {_wrong(clean) + _wrong(narrow_clean)}")
    _print_smallest([verdict for verdict, _ in (*found, *narrow_found) if verdict is not None])
    return 0


def _print_smallest(verdicts: Sequence[Verdict]) -> None:
    """Print which part of its size a difference needs to show, by classes whose mistakes are told by size."""
    smallest: dict[tuple[str, bool], float] = {}
    for verdict in verdicts:
        for each in verdict.compared:
            if each.finding is not None and each.finding.rounding:
                key = each.finding.kind, each.run.in_float32
                smallest[key] = min(smallest.get(key, 1.0), ALLOWANCE * each.finding.rounding)
    for (kind, in_float32), part in sorted(smallest.items()):
        print(f"{kind}{' in float32' if in_float32 else ''}: shows from {part:.1g} of a gradient's size on")


def _judged(case: Case, axes: Mapping[str, Any], python: str | None) -> tuple[Verdict | None, bool]:
    """Compare the runs of a case, and print what they came to; returns whether it is what it should be."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(case.script, encoding="utf-8")
        try:
            of_case = ScriptComparison(script=str(path), arguments=case.arguments, python=python, **axes)
            verdict = compare(of_case, lambda _: None)
        except DpsimError as error:
            print(f"FAILED  {case.name}: {error}", flush=True)
            return None, False
    kind = verdict.finding.kind if verdict.finding else ""
    right = kind == case.kind and any(case.design in each for each in (*verdict.designs, ""))
    largest = max(each.largest or 0.0 for each in verdict.compared)
    print(f"{'right' if right else 'WRONG'}  {case.name}: {verdict.sentence} [{largest:.2g}]", flush=True)
    return verdict, right


def _alarm(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.finding is not None and verdict.finding.is_mistake


def _wrong(judged: Sequence[tuple[Verdict | None, bool]]) -> int:
    return len(judged) - _right(judged)


def _right(judged: Sequence[tuple[Verdict | None, bool]]) -> int:
    return sum(right for _, right in judged)


if __name__ == "__main__":
    sys.exit(main())
