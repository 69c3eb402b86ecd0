"""The table that a run of gpu_check prints at its end."""

from __future__ import annotations

from dpsim.experiments.gpu_check.record import GpuCheck, Point
from dpsim.units import format_size


def table(record: GpuCheck) -> str:
    """One line a size, devices and mode, of the fastest algorithm; then the targets."""
    lines = []
    if record.gpus.simulated:
        lines.append("numba's CUDA simulator: the times mean nothing")
    lines.append(
        f"{'size':>9} {'devices':>7} {'mode':<10} {'algorithm':<16} {'time':>11} {'busbw':>11} {'of bound':>8}"
        f" {'wrong':>6}"
    )
    groups: dict[tuple[str, int, int, int], list[Point]] = {}
    for row in record.points:
        groups.setdefault((row.mode, row.processes, row.devices, row.size_bytes), []).append(row)
    for (mode, _, devices, size_bytes), group in sorted(groups.items(), key=lambda each: each[0][1:]):
        best = min(group, key=lambda row: row.time_s)
        share = "" if best.fraction_of_bound is None else f"{best.fraction_of_bound:.0%}"
        lines.append(
            f"{format_size(size_bytes):>9} {devices:>7} {mode:<10} {best.algorithm:<16} {best.time_s * 1e6:>8.2f} us"
            f" {best.busbw_bytes_per_s / 1e9:>6.1f} GB/s {share:>8} {sum(p.wrong for p in group):>6}"
        )
    for claim in record.claims:
        where = f", {claim.devices} devices of {format_size(claim.size_bytes)}" if claim.size_bytes else ""
        lines.append(
            f"{'met   ' if claim.met else 'MISSED'} {claim.name}{where} ({claim.algorithm}): {claim.measured:.2f},"
            f" {claim.better} {claim.target:g}"
        )
    lines += [f"left out: {reason}" for reason in record.summary.left_out]
    lines += [f"FAILED: {reason}" for reason in record.summary.failed]
    lines += [f"CUT OFF during: {record.summary.running}"] if record.summary.running else []
    lines.append(f"tests: {record.tests.line}")
    lines += [f"FAILED: {test}" for test in record.tests.failed]
    return "\n".join(lines)
