"""What sweeps say beside other processes: five in a row beside a neighbour that takes a core in bursts, and two quiet.

Owner: whoever changes how samples are taken or judged; it decides whether a first user's sweep on a shared machine can
be trusted, and ends. It goes on where it was interrupted. The quiet sweeps decide which of two settings is faster.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dpsim.experiments import command
from dpsim.harness.sweep.sweep import declared, sweep
from dpsim.report.sweep.saved import points, summary

_BESIDE = [*[""] * 2, *["--processes 1"] * 5, "--processes 2 --sleep-ms 0"]
_HEAD = "beside | error | medians inside | width | wrong | spoken of quiet's | clean | left out | seconds"


def swept(number: int, folder: Path) -> dict[str, Any]:
    """Return the points and seconds of a sweep, which is run unless the folder has it."""
    if not (saved := folder / f"{number}.json").exists():
        output = folder / str(number)
        words = [sys.executable, str(command.ROOT / "tests" / "support" / "neighbour.py"), *_BESIDE[number].split()]
        neighbour = subprocess.Popen(words if _BESIDE[number] else ["sleep", "inf"])
        begin_s = time.monotonic() if not output.exists() else float("nan")  # unknown if it was interrupted
        try:
            result = sweep(declared("fusion_threshold"), output, command.tell)
        finally:
            neighbour.kill()
        saved.write_text(
            json.dumps({"points": points(result), "summary": summary(result), "seconds": time.monotonic() - begin_s})
        )
    return dict(json.loads(saved.read_text()))


def verdicts(run: dict[str, Any]) -> dict[str, tuple[bool, set[str]]]:
    """Return of each group whether something is said of it, and the settings that are called the best, if any are."""
    names = [str((point["fusion_threshold_bytes"], point["overlap"])) for point in run["points"]]
    groups = {group["name"]: group["verdict"] for group in run["summary"]["groups"]}
    said = ("best", "no difference")
    return {name: (of["said"] in said, {names[index] for index in of["as_fast"]}) for name, of in groups.items()}


def line(number: int, runs: list[dict[str, Any]]) -> str:
    """Return the row of a sweep; widths are over the quiet ones', and a verdict is wrong where no quiet one agrees."""
    run, quiet, ours = runs[number], [verdicts(each) for each in runs[:2]], verdicts(runs[number])
    told = [name for name in ours if any(each[name][0] for each in quiet)]
    best = {name: [each[name][1] for each in quiet if each[name][1]] for name in ours}
    both = [name for name in ours if ours[name][1] and best[name]]
    wrong = sum(not any(ours[name][1] & each for each in best[name]) for name in both)
    spoken = sum(ours[name][0] for name in told)
    bands = [[(p["predicted_low_s"], p["predicted_high_s"], p["measured_step_s"]) for p in r["points"]] for r in runs]
    widths = [statistics.median((high - low) / step for low, high, step in band) for band in bands]
    inside = statistics.mean(low <= step <= high for low, high, step in bands[number])
    error = statistics.median(abs(p["error"]) for p in run["points"] if p["scored"] and p["devices"] > 1)
    cells = [_BESIDE[number] or "quiet", f"{error:.1%}", f"{inside:.0%}"]
    cells += [f"{widths[number] / statistics.mean(widths[:2]):.2f}", str(wrong), f"{spoken} of {len(told)}"]
    cells += [f"{run['summary']['share_clean']:.0%}", str(len(runs[0]["points"]) - len(run["points"]))]
    return " | ".join([*cells, f"{run['seconds']:.0f}"])


def main() -> None:
    """Sweep, and print a row for each sweep."""
    options = command.parser("neighbours", __doc__)
    options.add_argument("--output", type=Path, default=Path("reports/neighbours"), help="folder of the sweeps")
    folder = options.parse_args().output.absolute()
    os.environ["DPSIM_CACHE_DIR"] = str(folder / "cache")  # so that intervals do not learn from these sweeps
    runs = [swept(number, folder) for number in range(len(_BESIDE))]
    print("\n".join([_HEAD, *(line(number, runs) for number in range(len(runs)))]))
    print(f"time beside two busy processes / quiet: {2 * runs[7]['seconds'] / sum(r['seconds'] for r in runs[:2]):.1f}")


if __name__ == "__main__":
    main()
