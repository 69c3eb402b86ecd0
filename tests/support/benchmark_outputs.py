"""What nccl-tests, OSU and IMB print, after the format strings of their sources, for the tests of the readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Points = Sequence[tuple[int, float]]


def osu(points: Points, *, version: str = " v5.8", full: bool = False, datatype: str = "", passed: str = "") -> str:
    """``osu_allreduce``: 2 columns; 5 with ``-f`` (``full``); ``-c`` adds a validation; 7.x names the data type."""
    lines = ["", f"# OSU MPI Allreduce Latency Test{version}"] + [f"# Datatype: {datatype}."] * bool(datatype)
    more = "   Min Latency(us)   Max Latency(us)  Iterations" if full else ""
    lines.append("# Size       Avg Latency(us)" + more + ("        Validation" if passed else ""))
    for size, us in points:
        line = f"{size:<10d}{us:18.2f}"
        if full:
            line += f"{us * 0.9:18.2f}{us * 1.1:18.2f}{1000:12d}"
        lines.append(line + (f"{passed:>18s}" if passed else ""))
    return "\n".join(lines) + "\n"


def imb(tables: dict[int, Points], *, datatype: str = "MPI_FLOAT", defects: float | None = None) -> str:
    """``IMB-MPI1 PingPong Allreduce``: a table a number of processes, after one of another benchmark."""
    rule = "#" + "-" * 64
    lines = [
        rule,
        "#    Intel(R) MPI Benchmarks 2021.3, MPI-1 part",
        rule,
        "# MPI Version           : 3.1",
        "",
        f"# MPI_Datatype for reductions    :   {datatype} ",
        "# MPI_Op                         :   MPI_SUM  ",
        "",
        rule,
        "# Benchmarking PingPong ",
        "# #processes = 2 ",
        rule,
        "       #bytes #repetitions      t[usec]   Mbytes/sec",
        f"{0:13d}{1000:13d}{0.86:13.2f}{0:13.2f}",
        "",
    ]
    for processes, points in tables.items():
        idle = max(tables) - processes
        lines += ["", rule, "# Benchmarking Allreduce ", f"# #processes = {processes} "]
        lines += [f"# ( {idle} additional processes waiting in MPI_Barrier)"] * bool(idle) + [rule]
        names = ["#bytes", "#repetitions", "t_min[usec]", "t_max[usec]", "t_avg[usec]"]
        lines.append("".join(f"{name:>13s}" for name in names + ["defects"] * (defects is not None)))
        for size, us in [(0, 0.04), *points]:
            line = f"{size:13d}{1000:13d}{us * 0.9:13.2f}{us * 1.1:13.2f}{us:13.2f}"
            lines.append(line + ("" if defects is None else f"{defects:13.2f}"))
    return "\n".join([*lines, "", "", "# All processes entering MPI_Finalize", "", ""])


def float_text(value: float, width: int) -> str:
    """``getFloatStr`` of nccl-tests: as many digits as fit."""
    power, bound = 0, 1
    while value >= bound:
        power, bound = power + 1, bound * 10
    if power < width - 2:
        return f"{value:{width}.2f}"
    if power < width - 1:
        return f"{value:{width}.1f}"
    return f"{value:{width}.0f}" if power < width + 1 else f"{value:{width}.{1 if width >= 7 else 0}e}"


def _figures(size: int, us: float, devices: int, program: str = "all_reduce_perf") -> tuple[float, float]:
    algbw = size / us / 1e3
    return algbw, algbw * (2 if program == "all_reduce_perf" else 1) * (devices - 1) / devices


def ranks(hosts: Sequence[str], group: str = " Group  0") -> list[str]:
    """The lines of nccl-tests that name the device of each rank."""
    return [
        f"#  Rank {rank:2d}{group} Pid {1000 + rank:6d} on {host:>10s} device {rank:2d} [0000:01:00] NVIDIA H100"
        for rank, host in enumerate(hosts)
    ]


def nccl(
    points: Points,
    in_place: Points,
    devices: int,
    *,
    lines_of_ranks: Sequence[str] = (),
    root: bool = True,
    checked: str = "#wrong",
    wrong: str = "0",
    type: str = "float",
    redop: str = "sum",
    verdict: str = "0 OK",
    program: str = "all_reduce_perf",
    time: str = "time",
    each: bool = False,
    stamp: bool = False,
    program_line: str | None = None,
) -> str:
    """``program``: out-of-place and in-place times of the same sizes.

    Old versions have no ``root``, no ``redop`` of all-gathers (the empty text here), and a column error in place of
    #wrong (``checked``). They do not name the program: ``program_line`` stands in place of that line.
    ``each`` adds the columns of each iteration's spread, ``stamp`` the time of day.
    """
    names = [time, "algbw", "busbw", checked] + ["i_min", "i_max", "i_p99", "i_cv%"] * each
    units = ["(us)", "(GB/s)", "(GB/s)", ""] + ["(us)", "(us)", "(us)", "(%)"] * each
    redops = [redop] if redop else []
    keys = ["size", "count", "type"] + ["redop"] * len(redops) + ["root"] * root
    key_units = ["(B)", "(elements)"] + [""] * (len(keys) - 2)

    def line(first: list[str], figures: list[str], last: str) -> str:
        return "  ".join(
            [*(f"{t:>12s}" for t in first[:2]), *(f"{t:>8s}" for t in first[2:]), *(f"{t:>7s}" for t in figures), last]
        )

    text = [
        "# nccl-tests version 2.17.9 nccl-headers=22807 nccl-library=22807",
        f"# Collective test starting: {program}" if program_line is None else program_line,
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1",
        "#",
        "# Using devices",
        *lines_of_ranks,
        "NCCL version 2.28.7+cuda13.0",
        "#",
        "#" + " " * 50 + "out-of-place" + " " * 23 + "in-place          ",
        "# " + line(keys, names * 2, "timestamp" * stamp)[2:],
        "# " + line(key_units, units * 2, "%Y-%m-%d %H:%M:%S" * stamp)[2:],
    ]
    for (size, us), (_, in_place_us) in zip(points, in_place, strict=True):
        figures = []
        for one in (us, in_place_us):
            algbw, busbw = _figures(size, one, devices, program)
            figures += [float_text(one, 7), float_text(algbw, 6), float_text(busbw, 6), wrong]
            figures += [float_text(x, 7) for x in (one * 0.9, one * 1.2, one * 1.1, 3.0)] * each
        count = size // (4 if type == "float" else 2) // (1 if program == "all_reduce_perf" else devices)
        first = [str(size), str(count), type, *redops] + ["-1"] * root
        text.append(line(first, figures, "2025-11-21 08:17:16" * stamp))
    text += [f"# Out of bounds values : {verdict}", "# Avg bus bandwidth    : 1.5 ", "#"]
    return "\n".join([*text, f"# Collective test concluded: {program}", ""])


def nccl_report(
    points: Points,
    in_place: Points,
    hosts: Sequence[str],
    of_a_process: int = 1,
    program: str = "all_reduce_perf",
    redop: str = "sum",
) -> dict[str, Any]:
    """The object that ``program -J`` writes: one entry of ``devices`` a process."""
    devices = len(hosts) * of_a_process

    def side(size: int, us: float) -> dict[str, Any]:
        algbw, busbw = (round(value, 6) for value in _figures(size, us, devices, program))
        return {"time": round(us, 6), "alg_bw": algbw, "bus_bw": busbw, "nwrong": 0.0}

    results = [
        {"size": size, "count": size // 4 // (1 if program == "all_reduce_perf" else devices), "type": "float"}
        | {"redop": redop, "root": "    -1"}
        | {"out_of_place": side(size, us), "in_place": side(size, in_place_us)}
        | {"actual_iterations": 20, "experiment_name": "AllReduce"}
        for (size, us), (_, in_place_us) in zip(points, in_place, strict=True)
    ]
    config = {"nthreads": 1, "ngpus": of_a_process, "minimum_bytes": 8, "validation": 1} | {
        "devices": [
            {"rank": process * of_a_process, "group": 0, "pid": 7, "hostname": host, "device": 0}
            | {"device_hex": "0000:01:00", "device_info": "NVIDIA H100"}
            for process, host in enumerate(hosts)
        ]
    }
    return {
        "version": 2,
        "start_time": "2025-11-21 08:17:16",
        "args": [f"./build/{program}", "-J", "x.json"],
        "env": ["HOME=/root"],
        "nccl_version": 22807,
        "config": config,
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 1.5, "okay": "unchecked"},
        "end_time": "2025-11-21 08:17:16",
        "errors": [],
    }


def nccl_json(points: Points, in_place: Points, hosts: Sequence[str], of_a_process: int = 1) -> str:
    """``nccl_report`` as it stands in the file: all on one line."""
    return json.dumps(nccl_report(points, in_place, hosts, of_a_process), separators=(",", ":"))
