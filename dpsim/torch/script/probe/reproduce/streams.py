"""Random numbers from one stream a sample, and batch norm over all ranks, so that ranks can be compared. Loads torch.

What is random by design, such as dropout, is drawn per sample: from a generator that the sample, the step and the
number of the draw within a forward pass decide. Then a sample gets the same numbers on whatever rank it is. Batch norm
takes the statistics of the global batch; the running ones go on as they would without dpsim. Where steps are compared
that have other numbers of micro-batches, it takes the running statistics that the step began with.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from dpsim.torch.script.probe.process_group import replace_everywhere
from dpsim.torch.script.probe.reproduce.values import numpy_random

_SEED_BITS = 2**63 - 1
_FILLS = ("bernoulli_", "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_")
_CREATED = {"rand": "uniform_", "randn": "normal_", "rand_like": "uniform_", "randn_like": "normal_"}
_CHANNEL_DROPOUTS = ("dropout1d", "dropout2d", "dropout3d", "feature_dropout")


class SampleStreams:
    """The streams of the samples of one forward pass, from its beginning to the end of its backward."""

    def __init__(self) -> None:
        self._keys: Sequence[int] = ()
        self._draw = 0
        self.switched: dict[str, None] = {}
        self.group: Any = None
        """The process group of batch norm's sums; none on a single rank."""
        self.running_norms = False
        self._running: dict[int, tuple[Any, Any]] = {}
        """The running statistics that a step began with, by the ``id`` of the means."""

    def begin_step(self) -> None:
        """Forget the running statistics of the step before."""
        self._running.clear()

    def begin(self, keys: Sequence[int]) -> None:
        """Begin a forward pass of samples with these keys, which differ from sample to sample and from step to step."""
        self._keys, self._draw = keys, 0

    def end(self) -> None:
        """Leave random numbers and batch norm alone again."""
        self._keys = ()

    @property
    def active(self) -> bool:
        """Whether a forward pass or its backward is going on."""
        return bool(self._keys)

    def fill(self, kind: str, target: Any, call: Callable[[Any, Any], None]) -> Any:
        """Fill ``target``, calling ``call(part, generator)`` for the part of each sample; returns it."""
        self._draw += 1
        self.switched.setdefault(kind)
        samples = len(self._keys)
        dimension = next((d for d in range(min(target.dim(), 2)) if target.shape[d] == samples), None)
        if isinstance(target, torch.nn.Parameter):
            dimension = None
        if dimension is None and target.dim() and target.shape[0] % samples == 0:
            parts = target.view(samples, -1, *target.shape[1:]) if target.is_contiguous() else None
        elif dimension is not None:
            parts = target.transpose(0, dimension)
        else:
            parts = None
        with torch.no_grad():
            if parts is None:
                call(target, _generator(0, self._draw))
            else:
                for key, part in zip(self._keys, parts):
                    call(part, _generator(key, self._draw))
        return target

    def dropped(self, values: Any, probability: float, shape: Sequence[int], *, inplace: bool = False) -> Any:
        """Return ``values`` after dropout with a mask of ``shape``."""
        mask = torch.empty(tuple(shape), device=values.device)
        self.fill("dropout", mask, lambda part, generator: part.uniform_(generator=generator))
        kept = (mask >= probability).to(values.dtype) / (1 - probability) if probability < 1 else torch.zeros_like(mask)
        return values.mul_(kept) if inplace else values * kept

    def batch_norm(
        self,
        values: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        """Return batch norm with the statistics of the samples of all ranks."""
        began = running_mean, running_var
        if running_mean is not None:
            if self.running_norms:
                began = self._running.setdefault(id(running_mean), (running_mean.clone(), running_var.clone()))
            with torch.no_grad():
                _BATCH_NORM(values.detach(), running_mean, running_var, None, None, True, momentum, eps)
        if self.running_norms and running_mean is not None:
            return _BATCH_NORM(values, *began, weight, bias, False, momentum, eps)
        dimensions = [d for d in range(values.dim()) if d != 1]
        count = torch.tensor(float(values.numel() // values.shape[1]))
        if self.group is not None:
            distributed.all_reduce(count, group=self.group)
        mean = self._total(values.float().sum(dimensions)) / count
        shape = [1, -1, *(1 for _ in dimensions[1:])]
        centred = values.float() - mean.view(shape)
        variance = self._total((centred * centred).sum(dimensions)) / count
        normed = centred * torch.rsqrt(variance + eps).view(shape)
        if weight is not None:
            normed = normed * weight.view(shape)
        return (normed if bias is None else normed + bias.view(shape)).to(values.dtype)

    def _total(self, sums: Any) -> Any:
        return sums if self.group is None else _SumOfRanks.apply(sums, self.group)


class _SumOfRanks(torch.autograd.Function):  # type: ignore[misc]
    """The sum over all ranks; the gradient of each rank's own part is that of the sum of the ranks' losses."""

    @staticmethod
    def forward(context: Any, values: Any, group: Any) -> Any:
        context.group, total = group, values.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        total = gradient.clone()
        distributed.all_reduce(total, group=context.group)
        return total, None


_BATCH_NORM = functional.batch_norm


def _generator(*words: int) -> Any:
    digest = hashlib.blake2b(",".join(map(str, words)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & _SEED_BITS)


def sample_key(step: int, identity: int) -> int:
    """Return the key of a sample's stream in a step."""
    return hash((step, identity))


def install(streams: SampleStreams) -> None:
    """Let PyTorch's dropout, random fills, attention and batch norm draw from ``streams`` while it is active."""
    for name in _FILLS:
        setattr(torch.Tensor, name, _filling(streams, name, getattr(torch.Tensor, name)))
    for name, fill in _CREATED.items():
        replace_everywhere(getattr(torch, name), _creating(streams, fill, getattr(torch, name)))
    for name in ("dropout", *_CHANNEL_DROPOUTS):
        if original := getattr(functional, name, None):
            replace_everywhere(original, _dropping(streams, name, original))
    replace_everywhere(_BATCH_NORM, _norming(streams))
    replace_everywhere(
        functional.scaled_dot_product_attention, _attending(streams, functional.scaled_dot_product_attention)
    )
    _MapDatasetFetcher.fetch = _fetching(_MapDatasetFetcher.fetch)


def _filling(streams: SampleStreams, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def filled(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not streams.active or keywords.get("generator") is not None:
            return original(self, *arguments, **keywords)
        if arguments and isinstance(arguments[0], torch.Tensor):  # probabilities, one an element
            uniform = torch.empty_like(arguments[0])
            streams.fill("random numbers", uniform, lambda part, generator: _uniform(part, generator=generator))
            return self.copy_((uniform < arguments[0]).to(self.dtype))
        keywords.pop("generator", None)
        return streams.fill(
            "random numbers",
            self,
            lambda part, generator: original(part, *arguments, generator=generator, **keywords),
        )

    return filled


_uniform = torch.Tensor.uniform_


def _creating(streams: SampleStreams, fill: str, original: Any) -> Any:
    @functools.wraps(original)
    def created(*arguments: Any, **keywords: Any) -> Any:
        if not streams.active or keywords.get("generator") is not None or keywords.get("requires_grad"):
            return original(*arguments, **keywords)
        state = torch.get_rng_state()
        tensor = original(*arguments, **keywords)
        torch.set_rng_state(state)
        return getattr(tensor, fill)()

    return created


def _dropping(streams: SampleStreams, name: str, original: Any) -> Any:
    @functools.wraps(original)
    def dropped(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not (streams.active and training and p > 0) or (name != "dropout" and input.dim() < 3):
            return original(input, p, training, inplace)
        shape = input.shape if name == "dropout" else (*input.shape[:2], *(1 for _ in input.shape[2:]))
        return streams.dropped(input, p, shape, inplace=inplace)

    return dropped


def _norming(streams: SampleStreams) -> Any:
    @functools.wraps(_BATCH_NORM)
    def batch_norm(*arguments: Any, **keywords: Any) -> Any:
        training = keywords.get("training", arguments[5] if len(arguments) > 5 else False)
        if streams.active and training:
            return streams.batch_norm(*arguments, **keywords)
        return _BATCH_NORM(*arguments, **keywords)

    return batch_norm


def _attending(streams: SampleStreams, original: Any) -> Any:
    @functools.wraps(original)
    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if not streams.active or dropout_p == 0:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            heads = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        elif attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        weights = functional.softmax(scores, dim=-1)
        return streams.dropped(weights, dropout_p, weights.shape) @ value

    return attention


def _fetching(original: Any) -> Any:
    """Let a data set that changes samples at random do so from one stream a sample, in whichever process it does."""

    def fetch(self: Any, indices: Any) -> Any:
        one_by_one = self.auto_collation and isinstance(indices, (list, tuple)) and hasattr(self.dataset, "__getitem__")
        if not one_by_one:
            return original(self, indices)
        numpy = numpy_random()
        states = torch.get_rng_state(), random.getstate(), numpy and numpy.get_state()
        samples = []
        for index in indices:
            _seed_everything(root_index(self.dataset, index)[0])
            samples.append(
                root_index(self.dataset, index)[1][index] if isinstance(index, Whole) else self.dataset[index]
            )
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.set_state(states[2])
        return self.collate_fn(samples)

    return fetch


def _seed_everything(index: Any) -> None:
    seed = _generator(-1, index if isinstance(index, int) else 0).initial_seed()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := numpy_random():
        numpy.seed(seed % 2**32)


class Whole(int):
    """An index in the data set that a ``Subset`` is of, whatever that leaves out."""


def root_index(dataset: Any, index: Any) -> tuple[Any, Any]:
    """Return the index in the data set that a ``Subset`` of subsets is of, and that data set."""
    while isinstance(dataset, torch.utils.data.Subset) and isinstance(index, int):
        index, dataset = index if isinstance(index, Whole) else int(dataset.indices[index]), dataset.dataset
    return index, dataset
