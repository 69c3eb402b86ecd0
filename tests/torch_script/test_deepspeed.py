"""The buckets of DeepSpeed's ZeRO-2 are those of the rule ``capped``, by its own code where it is installed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpsim.lowering.fusion import fuse

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install deepspeed")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

WIDTHS = (10, 30, 50, 20, 100, 4)
CAPS = (1, 400, 1500, 2000, 500_000_000)
"""``reduce_bucket_size`` counts numbers."""
SCRIPT = f"""
import json, sys
import deepspeed, torch
from torch import distributed, nn

network = nn.Sequential(*(nn.Linear(*pair) for pair in zip({WIDTHS}, {WIDTHS[1:]})))
backend = sys.modules["deepspeed.comm.torch"].TorchBackend
reduce, sent = backend.all_reduce, []
def all_reduce(self, tensor, *arguments, **keywords):
    sent.append(tensor.numel())
    return reduce(self, tensor, *arguments, **keywords)
for cap in {CAPS}:
    zero = {{"stage": 2, "reduce_bucket_size": cap, "reduce_scatter": False, "overlap_comm": False}}
    config = {{"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "zero_optimization": zero}}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=network, config=config, optimizer=optimizer)
    backend.all_reduce = all_reduce
    sent.clear()
    engine.backward(engine(torch.ones(4, {WIDTHS[0]})).sum())
    backend.all_reduce = reduce
    if distributed.get_rank() == 0:
        print("buckets", json.dumps(sent), flush=True)
    engine.destroy()
"""


def test_zero_2_closes_a_bucket_before_it_would_exceed_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sent = [json.loads(line.removeprefix("buckets")) for line in done.stdout.splitlines() if line.startswith("buckets")]
    assert len(sent) == len(CAPS), done.stderr
    forward = [size for a, b in itertools.pairwise(WIDTHS) for size in (a * b, b)]
    numbers = np.array(forward[::-1])
    for cap, buckets in zip(CAPS, sent, strict=True):
        starts = fuse(4 * numbers, "capped", 4.0 * cap)
        assert buckets == [numbers[a:b].sum() for a, b in itertools.pairwise(starts)], cap
