"""``dpsim predict --find``: one sentence for each machine and number of devices, as JSON too, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from published_files import WORKLOAD

Dpsim = Callable[..., tuple[int, str, str]]
ASKED = f"predict --workload {WORKLOAD} --machine 10gbe --devices 8 --local-batch 16"


def test_the_answer_comes_first_and_fed_back_it_reaches_the_target(dpsim: Dpsim, tmp_path: Path) -> None:
    code, text, _ = dpsim(*f"{ASKED} --find bandwidth --target efficiency=80%".split())
    first, *notes = text.splitlines()
    assert code == 0 and notes and all(note.startswith("Note: ") for note in notes)
    assert first.startswith("8 devices, local batch 16, tarantella with threshold 32 KiB, ring, a latency of ")
    assert "us: 80% scaling efficiency is reached with a bandwidth of " in first
    gbit = re.findall(r"([0-9.]+) Gbit/s", first)[0]
    efficiencies = []
    for factor in (1.0, 0.98):
        file = tmp_path / "mine.toml"
        file.write_text(
            'schema = "dpsim.machine/1"\nname = "mine"\n[link]\nlatency_s = "15us"\nrelative_uncertainty = 0.22\n'
            f'bandwidth_bytes_per_s = "{factor * float(gbit):.6f}gbit"\n'
        )
        code, text, _ = dpsim(*ASKED.replace("10gbe", str(file)).split(), "--json")
        efficiencies.append(json.loads(text)["summary"]["best"][0]["scaling_efficiency"])
    assert efficiencies[0] >= 0.8 > efficiencies[1]


def test_each_machine_and_number_of_devices_has_a_record(dpsim: Dpsim, tmp_path: Path) -> None:
    asked = ASKED.replace("10gbe", "10gbe,25gbe").replace("--devices 8", "--devices 4,8")
    file = tmp_path / "found.json"
    code, text, _ = dpsim(*f"{asked} --find latency --target speedup=2 --json --output {file}".split())
    printed = json.loads(text)
    assert code == 0 and printed == json.loads(file.read_text())
    assert [(p["machine"], p["devices"]) for p in printed["points"]] == [
        ("10gbe", 4),
        ("10gbe", 8),
        ("25gbe", 4),
        ("25gbe", 8),
    ]
    for point in printed["points"]:
        assert (point["find"], point["goal"], point["target"]) == ("latency", "speedup", 2.0)
        assert point["value_low"] <= point["value"] <= point["value_high"]
    assert printed["summary"]["sentences"][2].startswith(
        "25gbe: 4 devices, local batch 16, tarantella with threshold 32 KiB, ring, a bandwidth of "
    )


def test_the_best_bucket_needs_no_target(dpsim: Dpsim) -> None:
    code, text, _ = dpsim(*f"{ASKED} --find bucket --fusion-rule horovod".split())
    assert code == 0 and text.startswith("8 devices, local batch 16, ring: the best bucket of horovod is ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--find bandwidth", "no target for --find bandwidth"),
        ("--target efficiency=90%", "1 target without --find"),
        ("--find bandwidth --target efficiency=90% --target speedup=2", "2 targets for --find bandwidth"),
        ("--find bandwidth --target efficiency=0", "a target of 0% scaling efficiency"),
        ("--find bandwidth --target efficiency=101%", "a target of 101% scaling efficiency"),
        ("--find bandwidth --target efficiency=90", "a target of 9000% scaling efficiency"),
        ("--find bandwidth --target efficiency=most", "share 'most' is not understood"),
        ("--find bandwidth --target speedup=0", "a target speedup of 0.0"),
        ("--find bandwidth --target step-time=0ms", "a target step-time of 0.0"),
        ("--find bandwith --target efficiency=90%", "did you mean 'bandwidth'?"),
        ("--find bucket --fusion-threshold 1MiB", "--find and --fusion-threshold"),
        ("--find bucket --plot drawn.svg", "--find and --plot"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_message(dpsim: Dpsim, flags: str, said: str) -> None:
    code, out, error = dpsim(*ASKED.split(), *flags.split())
    assert code == 2 and not out
    assert error.startswith("dpsim: ") and said in error and "Traceback" not in error
