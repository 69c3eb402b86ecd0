"""``TorchReplica``: a PyTorch module that dpsim's runtime trains, with parameters and gradients in its memory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpsim.errors import ConfigError, DpsimError
from dpsim.memory import HOST, Memory
from dpsim.nn.network import NoEvents
from dpsim.replica import Array, Batch, BatchSums, DeferredSums, LayerSpec, Replica, StepEvents
from dpsim.torch.module.announcer import Announcer, replaced
from dpsim.torch.module.layers import layers_of
from dpsim.torch.module.parameters import trained_parameters
from dpsim.torch.module.state import Tensor, computing_in, move_state, on_host, tensor_of, unchanged, uploaded
from dpsim.user_code import place_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""(scores [b, classes, ...], labels [b, ...]) -> the sum of the loss over the samples."""
_TORCH = str(Path(torch.__file__).parent)
_EXAMPLE_SAMPLES = 2
"""Samples of zeros that a module is traced and compiled with: batch norms need more than one."""
_cross_entropy = functools.partial(torch.nn.functional.cross_entropy, reduction="sum")


class TorchReplica:
    """A ``dpsim.replica.DeviceReplica`` from a ``torch.nn.Module``.

    ``build`` is a function that returns the module; it is called with PyTorch's random generator seeded, so that a seed
    gives the same parameters in every training and on every rank. Given a module itself, its parameters start as they
    are, whatever the seed. The module is called with a batch [b, *input_shape], of ``input_dtype`` or in its own dtype,
    and returns scores [b, classes, *label_shape]. ``loss`` makes the sum over the samples of them and the labels
    [b, *label_shape] (cross-entropy if left out). Layers are the modules with trainable parameters of their own; see
    ``dpsim.torch.module.layers`` for their order, which a
    step on zeros tells. Buffers and frozen parameters are state, which starts as it is built with seed 0.

    Its parameters and their gradients share the memory that the runtime binds: nothing is copied. PyTorch's random
    generator is seeded by the position of each batch's first sample. Raises ``ConfigError`` for what cannot be trained.
    """

    def __init__(
        self,
        build: Callable[[], torch.nn.Module],
        input_shape: Sequence[int],
        loss: Loss | None = None,
        *,
        input_dtype: str | None = None,
        label_shape: Sequence[int] = (),
    ) -> None:
        self._build = build
        module = _built(build, 0)
        self._trained = trained_parameters(module)
        _check_loss(loss)
        self.module, self.loss = module, loss or _cross_entropy
        self._memory, self._device = HOST, torch.device("cpu")
        self._state = move_state(module, HOST)
        self._dtype = self._trained.parameters[0].parameter.dtype
        zeros = np.zeros((_EXAMPLE_SAMPLES, *input_shape), input_dtype or str(self._dtype).removeprefix("torch."))
        labels = np.zeros((len(zeros), *label_shape), np.int64)
        self._example = Batch(x=zeros, labels=labels, leaves=(0, len(zeros)))
        with unchanged(self._state.arrays), torch.random.fork_rng(devices=[]):
            with self._trained.untouched():
                self._layers = layers_of(module, self._trace)
            self._trained.check_complete()
        self._specs = tuple(layer.spec for layer in self._layers)
        self._parameters = {
            tensor.name: parameter
            for layer in self._layers
            for tensor, parameter in zip(layer.spec.tensors, layer.parameters, strict=True)
        }
        self._initial = {name: on_host(each).reshape(each.shape) for name, each in self._parameters.items()}
        self._announcer = Announcer(self._layers)
        self._views: dict[int, tuple[Mapping[str, Array], list[Tensor]]] = {}
        self._gradients: list[Tensor] = []
        self._adds = False
        self._values: Mapping[str, Array] | None = None

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._specs

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        """Return the parameters of a module that is built with this seed; see above."""
        module = _built(self._build, seed)
        if module is self.module:
            return {name: value.copy() for name, value in self._initial.items()}
        named = dict(module.named_parameters())
        return {name: on_host(named[name]).reshape(each.shape) for name, each in self._parameters.items()}

    def bind(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        with computing_in(self._memory, self._device):
            if self._values is not parameters:
                self._values, self._views = parameters, {}
                for name, parameter in self._parameters.items():
                    parameter.data = tensor_of(parameters[name])
            if id(gradients) not in self._views:
                self._views[id(gradients)] = (gradients, [tensor_of(gradients[name]) for name in self._parameters])
            self._gradients = self._views[id(gradients)][1]
            for parameter, gradient in zip(self._parameters.values(), self._gradients, strict=True):
                parameter.grad = gradient
        self._adds = False

    def add_gradients(self) -> None:
        """See ``AddingReplica``: autograd adds to what is in ``grad``."""
        self._adds = True

    def state(self) -> dict[str, Array]:
        return dict(self._state.arrays)

    def compute_in(self, memory: Memory) -> None:
        """See ``DeviceReplica``."""
        self._memory = memory
        self._device = tensor_of(memory.zeros(1)).device
        with computing_in(memory, self._device):
            self._state = move_state(self.module, memory)
            if isinstance(self.loss, torch.nn.Module):
                self.loss.to(self._device)

    def leaf_difference(self, batch: Batch) -> str | None:
        """See ``DeviceReplica``. Leaves are computed one by one, so each is computed twice, amid others in between."""
        _fix_algorithms()
        return _leaf_difference(self, batch, self._memory)

    def warm_up(self) -> None:
        """See ``WarmUpReplica``."""
        with unchanged(self._state.arrays):
            self.forward_backward(self._example, NoEvents())

    def forward_backward(self, batch: Batch, events: StepEvents) -> DeferredSums:
        """Write the gradients of the summed loss into the bound arrays; a rank without samples writes zeros.

        Raises ``ConfigError`` for what the module raises, and if it puts other tensors in place of its gradients or
        state.
        """
        announcer, memory = self._announcer, self._memory
        with computing_in(memory, self._device):
            torch.manual_seed(_seed(batch))
            sums = DeferredSums(values=memory.xp.zeros(2, np.float64), samples=len(batch.labels), memory=memory)
            announcer.begin(events, self._gradients, adds=self._adds)
            try:
                with self._trained.untouched(), _explained("the module's step", lambda: announcer.raised):
                    if len(batch.labels):
                        self._train(batch, tensor_of(sums.values))
                    else:
                        announcer.forward_over()
                        announcer.loss_over()
                    announcer.backward_over()
            finally:
                announcer.stop()
            self._check_gradients()
            self._state.check()
        return sums

    def evaluate(self, x: Array, labels: NDArray[np.int64]) -> BatchSums:
        """Forward only, in evaluation mode. Raises ``ConfigError`` as forward_backward."""
        with (
            computing_in(self._memory, self._device),
            torch.no_grad(),
            self._trained.untouched(),
            _explained("the module's evaluation"),
        ):
            self.module.eval()
            values = self._memory.xp.zeros(2, np.float64)
            if len(labels):
                loss, correct = self._computed(x, labels)
                tensor_of(values).copy_(torch.stack((loss.double(), correct.double())))
            return DeferredSums(values=values, samples=len(labels), memory=self._memory).fetch()

    def _train(self, batch: Batch, values: Tensor) -> None:
        self.module.train()
        with torch.enable_grad():
            loss, correct = self._computed(batch.x, batch.labels, self._announcer.forward_over)
        values.copy_(torch.stack((loss.detach().double(), correct.double())))
        self._announcer.loss_over()
        with torch.autograd.set_multithreading_enabled(False):  # hooks run in this thread, which uses the stream
            loss.backward()

    def _trace(self) -> None:
        with _explained("the module's step on zeros"), torch.enable_grad():
            self.module.train()
            self._computed(self._example.x, self._example.labels)[0].backward()

    def _computed(
        self, x: Array, labels: NDArray[np.int64], forward_over: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of correct predictions."""
        inputs = uploaded(self._memory, "x", x)
        if inputs.is_floating_point():
            inputs = inputs.to(self._dtype)
        targets = uploaded(self._memory, "labels", labels)
        scores = self.module(inputs)
        if not isinstance(scores, torch.Tensor) or (scores.shape[:1] + scores.shape[2:]) != targets.shape:
            shape = ", ".join(map(str, (len(labels), "classes", *labels.shape[1:])))
            raise _unfit("the module returned", scores, f"scores of shape [{shape}]")
        forward_over()
        loss = self.loss(scores, targets)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise _unfit("the loss is", loss, "a tensor without dimensions: the sum over the samples")
        return loss, (scores.detach().argmax(dim=1) == targets).sum()

    def _check_gradients(self) -> None:
        for (name, parameter), gradient in zip(self._parameters.items(), self._gradients, strict=True):
            if parameter.grad is not gradient:
                raise replaced(name)


def _built(build: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    if isinstance(build, torch.nn.Module):
        return build
    with torch.random.fork_rng(devices=[]), _explained("the function that builds the module"):
        torch.manual_seed(seed)
        module = build()
    if not isinstance(module, torch.nn.Module):
        raise _unfit("the function that builds the module returned", module, "a torch.nn.Module")
    return module


def _check_loss(loss: Loss | None) -> None:
    reduction = getattr(loss, "reduction", "sum")
    if reduction != "sum":
        raise ConfigError(
            f"a loss with reduction {reduction!r}",
            allowed="the sum over the samples: sums of shares add up to the batch's, however unequal the shares are",
            remedy="give the loss reduction='sum'",
        )
    if isinstance(loss, torch.nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise ConfigError(
            "a loss with parameters that require a gradient, which nothing would train",
            allowed="a loss without trainable parameters",
            remedy="make them parameters of the module",
        )


def _unfit(what: str, value: Any, allowed: str) -> ConfigError:
    shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return ConfigError(f"{what} {type(value).__name__}{shape}", allowed=allowed)


def _seed(batch: Batch) -> int:
    """Return a seed for PyTorch's random numbers that depends on the batch's samples, not on the rank."""
    words = f"{batch.seed} {batch.step} {batch.first_sample}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


@contextlib.contextmanager
def _explained(doing: str, ours: Callable[[], BaseException | None] = lambda: None) -> Iterator[None]:
    """Raise ``ConfigError`` for an exception of a user's module; ``ours`` is one that is none of its."""
    try:
        yield
    except DpsimError:
        raise
    except Exception as error:
        if error is ours():
            raise
        where = place_of(error, _TORCH)
        raise ConfigError(
            f"{doing} raised {type(error).__name__}{f' ({where})' if where else ''}: {error}",
            allowed="a module that is called with the inputs [b, *input_shape] and returns scores [b, classes],"
            " and a loss of these and the labels [b]",
            remedy="see docs/torch-module.md",
        ) from error


def _fix_algorithms() -> None:
    """Let PyTorch use algorithms alone that add in a fixed order, in float32, for the rest of this process.

    Operations that have none then raise an error with their name.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def _leaf_difference(replica: Replica, batch: Batch, memory: Memory) -> str | None:
    """Return what differs if the leaves of a batch, each a step of its own, are computed again in another order."""
    initial = replica.initial_parameters(batch.seed)
    gradients = {name: memory.xp.zeros(value.shape, value.dtype) for name, value in initial.items()}
    replica.bind({name: memory.xp.asarray(value) for name, value in initial.items()}, gradients)
    leaves = [_part(batch, low, high) for low, high in itertools.pairwise(batch.leaves)]
    digests: list[dict[str, str]] = [{} for _ in leaves]
    with unchanged(replica.state()):
        for number in [*range(len(leaves)), *reversed(range(len(leaves)))]:
            sums = replica.forward_backward(leaves[number], NoEvents())
            values = memory.fetch(list(gradients.values()))
            names = ("the loss", *(f"the gradient of {name}" for name in gradients))
            for name, value in zip(names, [np.array(sums.fetch().loss), *values], strict=True):
                digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
                if digests[number].setdefault(name, digest) != digest:
                    return name
    return None


def _part(batch: Batch, low: int, high: int) -> Batch:
    x, labels = batch.x[low:high], batch.labels[low:high]
    return replace(batch, x=x, labels=labels, leaves=(0, high - low), first_sample=batch.first_sample + low)
