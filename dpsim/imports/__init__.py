"""Machines from what other benchmarks printed: nccl-tests, the OSU micro-benchmarks, the Intel MPI Benchmarks."""

from dpsim.imports.merge import Format, ImportConfig, Imported, import_machine

__all__ = ["Format", "ImportConfig", "Imported", "import_machine"]
