"""Tells the forward passes that train from those that evaluate. Loads torch."""

from __future__ import annotations

from typing import Any

import torch


class Training:
    """What forward and backward passes have shown of a script.

    With gradients enabled a forward pass trains if DDP or any module in it is in training mode: a library may leave the
    wrapper alone in evaluation mode. Where all of them are in evaluation mode, a backward pass that follows shows that
    the script trains in that mode (with its dropout and batch norm frozen), and such forward passes train from then on.
    """

    def __init__(self) -> None:
        self._in_evaluation_mode = False
        self._evaluated = False

    def forward(self, ddp: Any) -> bool:
        """Whether this forward pass of ``ddp`` trains."""
        if not torch.is_grad_enabled():
            return False
        trains = self._in_evaluation_mode or any(module.training for module in ddp.modules())
        self._evaluated = not trains
        return trains

    def backward(self) -> None:
        """Learn from a backward pass that begins."""
        self._in_evaluation_mode |= self._evaluated
