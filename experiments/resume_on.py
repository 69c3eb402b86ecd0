"""``python -m dpsim.experiments.resume_on`` resumes scripts on 2 devices after 4, and asks what was lost.

Ten have a planted mistake, which should be found and named alone; seven are clean. ``--only WORDS`` runs those whose
names have these words. The scripts stand in ``resume_on.toml``.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsim.errors import DpsimError
from dpsim.experiments import command
from dpsim.harness.reproduce.resume import Resumption, resume

_DECLARED: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_INDENTED = {"load": 4, "epoch": 4, "end": 4, "save": 12}
"""Blanks before the lines of a part."""


@dataclass(frozen=True)
class Case:
    """A script by the parts that differ from the ordinary one, and the class that should be named ("" for none)."""

    name: str
    parts: Mapping[str, str]
    kind: str = ""

    @property
    def script(self) -> str:
        """The text of the script, with a line of loading replaced (``without``, ``with``) or lines ``after`` it."""
        parts = _DECLARED["ordinary"] | self.parts
        parts["load"] = parts["load"].replace(parts.pop("without", "\0"), parts.pop("with", "")) + parts.pop(
            "after", ""
        )
        indented = {name: text.replace("\n", "\n" + " " * _INDENTED.get(name, 0)) for name, text in parts.items()}
        return str(_DECLARED["script"]).format(**indented)


def _cases(verdict: str) -> tuple[Case, ...]:
    return tuple(Case(name=table.pop("name"), kind=table.pop("kind", ""), parts=table) for table in _DECLARED[verdict])


MISTAKES, CLEAN = map(_cases, ("mistake", "clean"))


def main() -> int:
    """Run the cases and print a line for each, and the counts."""
    options = command.parser("resume_on", __doc__)
    options.add_argument("--only", default="", help="run the cases whose names contain this")
    given = options.parse_args()
    found, clean = ([_kinds(case) for case in cases if given.only in case.name] for cases in (MISTAKES, CLEAN))
    named = sum(kinds == (case.kind,) for case, kinds in found)
    print(f"planted mistakes: {len(found)}, found {sum(bool(kinds) for _, kinds in found)}, named {named}")
    print(f"clean scripts: {len(clean)}, alarms {sum(kinds != () for _, kinds in clean)}")
    return 0


def _kinds(case: Case) -> tuple[Case, tuple[str, ...] | None]:
    """Resume a case, print what it came to, and return the classes of what was lost; None where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(case.script, encoding="utf-8")
        try:
            resumed = resume(Resumption(script=str(path), devices=4, resume_on=2, steps=2), lambda _: None)
        except DpsimError as error:
            print(f"FAILED  {case.name}: {error}", flush=True)
            return case, None
    kinds = tuple(loss.kind for loss in resumed.judged.losses)
    right = kinds == ((case.kind,) if case.kind else ())
    print(f"{'right' if right else 'WRONG'}  {case.name}: {' '.join(resumed.sentences)}", flush=True)
    return case, kinds


if __name__ == "__main__":
    sys.exit(main())
