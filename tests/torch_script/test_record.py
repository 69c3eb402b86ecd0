"""Which steps of a script are recorded in which mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

from dpsim.torch.script.probe import process_group, record  # noqa: E402
from dpsim.torch.script.probe.endings import EnoughSteps  # noqa: E402
from dpsim.torch.script.probe.record import Recorder  # noqa: E402

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
        joins=False,
        device_type="cpu",
    )


def test_every_size_of_batch_is_recorded_in_every_mode() -> None:
    """Three batches an epoch, the last of them short, as there are three modes."""
    recorder, ddp = Recorder(12), model()
    with pytest.raises(EnoughSteps):
        for size in (4, 4, 2) * 9:
            recorder.forward(lambda *_: None, ddp, torch.zeros(size, 2))
            recorder.backward(lambda: None)
    modes = {size: [step.mode for step in recorder.steps if step.local_batch == size] for size in (4, 2)}
    assert modes[4] == ["whole", "forward", "gradients"] * 2 + ["whole", "forward"]
    assert modes[2] == ["whole", "forward", "gradients", "whole"]
    assert all(0 < step.loss_s < step.step_s for step in recorder.steps)


def test_a_script_that_trains_on_without_ddp_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    recorder, optimizer = Recorder(12), torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    said = []
    for _ in range(250):
        recorder.before_update(optimizer)
        recorder.after_update(optimizer)
        said.append(capsys.readouterr().err)
    assert "has called no model of DistributedDataParallel" in said[99] and not any(said[:99] + said[100:])


class QueuedGpu:
    """A GPU that does what it is asked for when the host synchronises; each event comes a second after the last."""

    def __init__(self) -> None:
        self.reached = self.asked = 0

    def event(self, *, enable_timing: bool) -> QueuedEvent:
        assert enable_timing
        return QueuedEvent(self)

    def synchronize(self) -> None:
        self.reached = self.asked


class QueuedEvent:
    def __init__(self, gpu: QueuedGpu) -> None:
        self._gpu, self.number = gpu, 0

    def record(self) -> None:
        self._gpu.asked += 1
        self.number = self._gpu.asked

    def elapsed_time(self, end: QueuedEvent) -> float:
        assert end.number <= self._gpu.reached, "cudaErrorNotReady"
        return 1e3 * (end.number - self.number)


def test_collectives_on_a_gpu_are_timed_there_and_the_host_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = QueuedGpu(), process_group.Clock()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(process_group, "perf_counter", lambda: 10.0)
    for module in (process_group, record):
        monkeypatch.setattr(module, "CLOCK", clock)
    recorder = Recorder(1)
    recorder.ddp = SimpleNamespace(device_type="cuda")
    assert recorder.now() == 10.0
    for _ in range(2):
        with process_group._collective([[SimpleNamespace(device=torch.device("cuda"))]]):
            pass
    assert gpu.reached == 0 and clock.now() == 10.0
    assert recorder.now() == 8.0 and recorder.now() == 8.0
