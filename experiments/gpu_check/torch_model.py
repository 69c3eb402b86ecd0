"""The trainings of gpu_check in PyTorch's eager mode, in float32 without TF32 or with autocast. Loads torch."""

from __future__ import annotations

import torch
from torch import nn

from dpsim.experiments.peers.torch_training import mlp, resnet20

_CLASSES, _RATE, _MOMENTUM = 10, 0.01, 0.9


class TorchModel:
    """A training on random samples. ``token`` is dpsim's name of the model, ``shape`` [H, W, C].

    With ``compute_dtype`` bfloat16 forward and loss run under ``torch.autocast``; parameters stay float32.
    """

    def __init__(
        self, token: str, shape: tuple[int, int, int], batch: int, compute_dtype: str, where: str = "cuda"
    ) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        height, width, channels = shape
        kind, _, hidden = token.partition(":")
        if kind == "mlp":
            model = mlp([height * width * channels, *map(int, hidden.split(",")), _CLASSES])
        else:
            model = resnet20(channels)
        self._where, self._rounds = where, compute_dtype == "bfloat16"
        self._model = model.to(where)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
        self._loss = nn.CrossEntropyLoss()
        self._x = torch.randn(batch, channels, height, width)
        self._labels = torch.randint(0, _CLASSES, (batch,))

    def steps(self, count: int) -> None:
        """Train ``count`` steps and wait for the GPU."""
        for _ in range(count):
            x, labels = self._x.to(self._where), self._labels.to(self._where)
            self._optimizer.zero_grad(set_to_none=False)  # gradients stay allocated, as dpsim's do
            with torch.autocast(self._where, torch.bfloat16, enabled=self._rounds):
                loss = self._loss(self._model(x), labels)
            loss.backward()
            self._optimizer.step()
        if self._where == "cuda":
            torch.cuda.synchronize()

    def activation_bytes(self) -> int:
        """Return the most memory that a step takes beyond parameters, gradients and optimizer."""
        self.steps(2)  # now gradients and the optimizer's state are allocated
        if self._where != "cuda":
            return 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.steps(1)
        return int(torch.cuda.max_memory_allocated() - before)

    def close(self) -> None:
        """Give its memory back."""
        del self._model, self._optimizer
        if self._where == "cuda":
            torch.cuda.empty_cache()
