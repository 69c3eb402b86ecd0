"""``python -m dpsim.experiments.explore_speed``: milliseconds from a slider's move to the drawn page, in a browser.

The default example, and ResNet-50 on 100,000 devices. What is timed contains the layout of the page, and no painting.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from dpsim import machine, workload
from dpsim.errors import ConfigError
from dpsim.experiments import command
from dpsim.explore.page import page
from dpsim.explore.world import EXAMPLE_MACHINE, EXAMPLE_WORKLOAD

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOVES = 60
_MOVE = """<script>{
const times = [];
for (let move = 0; move < %d; move++) {
  const slider = document.getElementById(["local_batch", "fusion_threshold_bytes", "latency_s"][move %% 3]);
  const begun = performance.now();
  slider.value = (Number(slider.value) + 1) %% (Number(slider.max) + 1);
  slider.dispatchEvent(new Event("input"));
  document.body.getBoundingClientRect();
  times.push(performance.now() - begun);
}
times.sort((a, b) => a - b);
const [median, slowest] = [times[times.length >> 1], times.at(-1)].map((each) => each.toFixed(1));
document.title = `median ${median} ms, slowest ${slowest} ms of ${times.length} moves`;
}</script>"""


def main() -> None:
    """Print the times of both pages. Raises ``ConfigError`` where there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ConfigError("no browser to measure in", allowed=", ".join(BROWSERS), remedy="install one of them")
    resnet = resources.files("dpsim.validation") / "workloads" / "resnet50.toml"
    pages = {
        "GoogLeNet on 8 devices": page(workload.read(EXAMPLE_WORKLOAD), machine.read(EXAMPLE_MACHINE), ""),
        "ResNet-50 on 100,000 devices": page(workload.read(str(resnet)), machine.read(EXAMPLE_MACHINE), "", 100_000),
    }
    for name, html in pages.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.html"
            file.write_text(html.replace("</body>", _MOVE % MOVES + "</body>"), encoding="utf-8")
            flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile")
            done = subprocess.run([browser, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True)
        found = re.search("<title>(.*?)</title>", done.stdout)
        print(f"{name}: {found[1] if found else done.stderr[-500:]}, {len(html) / 1e3:.0f} kB")


if __name__ == "__main__":
    raise SystemExit(command.ended("explore_speed", main))
