"""Results that dpsim wrote, as data: tables for pandas and a figure. ``dpsim.load`` reads them from their files."""

from dpsim.report.saved.bench import SavedBench
from dpsim.report.saved.quality import SavedQuality
from dpsim.report.saved.reproduction import SavedReproduction
from dpsim.report.saved.result import SavedResult
from dpsim.report.saved.sweep import SavedSweep
from dpsim.report.saved.training import SavedTraining

__all__ = ["SavedBench", "SavedQuality", "SavedReproduction", "SavedResult", "SavedSweep", "SavedTraining"]
