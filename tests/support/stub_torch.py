"""``python stub_torch.py PROBE``: loads each file of the probe with a stub in place of PyTorch, and prints how many."""

import importlib
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path


class Anything(type):
    """A class of any name, which has members of any name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *arguments, **keywords):
        return None


class Stub(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Finds torch and all that is in it."""

    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torch" else None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def main(probe):
    sys.meta_path.insert(0, Finder())
    sys.path.insert(0, str(probe))
    importlib.import_module("start").load_dpsim()
    count = 0
    for path in sorted(probe.rglob("*.py")):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
        if path.stem not in ("__init__", "sitecustomize"):
            name = ".".join(path.relative_to(probe).with_suffix("").parts)
            importlib.import_module("dpsim.torch.script.probe." + name)
        count += 1
    print(count)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
