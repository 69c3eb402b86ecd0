"""Which steps of a script are recorded in which mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dpsim[torch]'")

from dpsim.torch_ddp.endings import EnoughSteps  # noqa: E402
from dpsim.torch_ddp.record import Recorder  # noqa: E402

pytestmark = pytest.mark.torch


def model() -> Any:
    """What a recorder needs of a DDP model."""
    module = torch.nn.Linear(2, 2)
    return SimpleNamespace(
        module=module,
        modules=module.modules,
        parameters_to_ignore=(),
        require_backward_grad_sync=True,
        static_graph=False,
        device_type="cpu",
    )


def test_every_size_of_batch_is_recorded_in_every_mode() -> None:
    """Three batches an epoch, the last of them short, as there are three modes."""
    recorder, ddp = Recorder(12), model()
    with pytest.raises(EnoughSteps):
        for size in (4, 4, 2) * 9:
            with recorder.forward(ddp, (torch.zeros(size, 2),), {}):
                pass
            with recorder.backward():
                pass
    modes = {size: [step.mode for step in recorder.steps if step.local_batch == size] for size in (4, 2)}
    assert modes[4] == ["whole", "forward", "gradients"] * 2 + ["whole", "forward"]
    assert modes[2] == ["whole", "forward", "gradients", "whole"]
