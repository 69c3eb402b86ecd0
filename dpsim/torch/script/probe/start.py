"""``python start.py MODULE PATHS``: runs a module of this folder in the environment of a job, for dpsim.

That may be another environment than dpsim's, which has nothing of what dpsim needs. Of dpsim it loads this folder and
the few modules beside it that load the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path


def load_dpsim() -> None:
    """Let this process import dpsim from the folder that this file is in, and nothing else from there."""
    package = Path(__file__).resolve().parents[3]
    spec = importlib.util.spec_from_file_location(
        "dpsim", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None  # the name ends in .py
    sys.modules["dpsim"] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another program named dpsim in the job's environment harms nobody here
        spec.loader.exec_module(sys.modules["dpsim"])


if __name__ == "__main__":
    if Path(sys.path[0]) == Path(__file__).parent:  # Python puts it there, unless it is told not to
        del sys.path[0]
    load_dpsim()
    module = importlib.import_module(f"dpsim.torch.script.probe.{sys.argv[1]}")
    module.main(*map(Path, sys.argv[2:]))
