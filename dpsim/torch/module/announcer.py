"""Announces what a PyTorch module has computed, from hooks of its forward pass and of autograd."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from dpsim.errors import ConfigError
from dpsim.replica import StepEvents
from dpsim.torch.module.layers import ModuleLayer, gradient_in_parts


class Announcer:
    """A caller of the ``StepEvents`` of the step under way, between ``begin`` and ``backward_over``.

    Every layer is announced once in each direction, in order: those before a layer with it, if a module computes them
    later or not at all. So a layer with a parameter that gets no gradient is announced when backward is over.
    ``raised`` is what an event raised: no mistake of the module.
    """

    def __init__(self, layers: Sequence[ModuleLayer]) -> None:
        self.raised: BaseException | None = None
        self._layers = layers
        self._events: StepEvents | None = None
        self._gradients: dict[int, Any] = {}
        self._adds = False
        for number, layer in enumerate(layers):
            layer.module.register_forward_hook(functools.partial(self._announce_forward, number))
            for tensor, parameter in zip(layer.spec.tensors, layer.parameters, strict=True):
                hook = functools.partial(self._accumulated, number, tensor.name)
                parameter.register_post_accumulate_grad_hook(hook)
                parameter.register_hook(functools.partial(self._clear, id(parameter)))

    def begin(self, events: StepEvents, gradients: Sequence[Any], *, adds: bool) -> None:
        """Begin a pass, which must add its gradients to these tensors: one a parameter, in the order of the layers.

        Unless it ``adds`` to what is in them, each is cleared when its gradient comes, and not before: until then its
        memory may hold that of another layer.
        """
        self._events, self.raised, self._adds = events, None, adds
        parameters = [parameter for layer in self._layers for parameter in layer.parameters]
        self._gradients = {id(each): gradient for each, gradient in zip(parameters, gradients, strict=True)}
        self._pending = [{id(parameter) for parameter in layer.parameters} for layer in self._layers]
        self._forward, self._backward = 0, len(self._layers) - 1

    def forward_over(self) -> None:
        """Note that the module has computed its output."""
        self._announce_forward(len(self._layers) - 1)

    def loss_over(self) -> None:
        """Note that the loss is computed."""
        assert self._events is not None
        with self._kept():
            self._events.loss_done()

    def backward_over(self) -> None:
        """Announce the layers that are left: the gradients that they did not get are zero, and so added."""
        for pending in reversed(self._pending):
            for missing in pending:
                self._clear(missing)
                self._gradients[missing].add_(0.0)
            pending.clear()
            self._announce_backward()
        self._events = None

    def stop(self) -> None:
        """Stop: the pass has failed, and nothing is announced any more."""
        self._events = None

    def _clear(self, parameter: int, _: Any = None) -> None:
        """Clear the memory of a gradient, to which autograd adds next."""
        if self._events is not None and not self._adds:
            self._gradients[parameter].zero_()

    def _accumulated(self, layer: int, name: str, parameter: Any) -> None:
        if self._events is None:
            return
        if parameter.grad is not self._gradients[id(parameter)]:
            raise replaced(name)
        if id(parameter) not in self._pending[layer]:
            raise gradient_in_parts(name)
        self._pending[layer].discard(id(parameter))
        self._announce_backward()

    def _announce_forward(self, layer: int, *_: Any) -> None:
        if self._events is None:
            return
        with self._kept():
            while self._forward <= layer:
                self._forward += 1
                self._events.forward_done(self._forward - 1)

    def _announce_backward(self) -> None:
        assert self._events is not None
        with self._kept():
            while self._backward >= 0 and not self._pending[self._backward]:
                self._backward -= 1
                self._events.gradients_ready(self._backward + 1)
                self._events.backward_done(self._backward + 1)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.raised = error
            raise


def replaced(name: str) -> ConfigError:
    """Return the error for a gradient that is not where the runtime reduces it."""
    return ConfigError(
        f"the gradient of {name} is another tensor than the one that dpsim reduces",
        allowed="gradients that autograd adds to parameter.grad in place",
        remedy="leave parameter.grad alone, and call neither zero_grad nor an optimizer in the module",
    )
