"""What people look at: tables, figures, pages and traces, all rendered from one ``Comparison``."""

from dpsim.records.comparison import Comparison
from dpsim.report.sweep.warnings import warnings
from dpsim.report.trace import trace_events, write_trace
from dpsim.report.write import write_report

__all__ = ["Comparison", "trace_events", "warnings", "write_report", "write_trace"]
