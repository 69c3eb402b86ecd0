"""Trains kinds of scripts at two batches: what is recorded of their memory, and the peak that PyTorch profiles.

``python script_memories.py`` prints a JSON object: of each kind a list of (workload, peak in bytes).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn, optim
from torch.autograd import profiler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dpsim import codec
from dpsim.torch.script.probe import process_group
from dpsim.torch.script.probe.endings import EnoughSteps
from dpsim.torch.script.probe.run_script import install
from dpsim.torch.script.probe.script_record import script_record
from dpsim.torch.script.probe.step_memory import WeighingRecorder
from dpsim.torch.script.recorded import workload_of
from dpsim.torch.script.request import ScriptRequest
from dpsim.torch.script.script_record import ScriptRecord, recorded_of

DEVICES, CLASSES, TOKENS, WIDTH = 4, 10, 32, 64


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Four layers between an embedding and a head; ``checkpoints``: each layer is computed again in backward."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, WIDTH), nn.Linear(WIDTH, 500)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.checkpoints = checkpoints

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def mlp() -> Any:
    return nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, CLASSES))


def cnn() -> Any:
    channels = (3, 16, 32, 32)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise(channels)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def samples(shape: tuple[int, ...], batch: int) -> tuple[Any, Any]:
    return torch.randn(batch, *shape), torch.randint(CLASSES, (batch,))


def tokens(batch: int) -> tuple[Any, Any]:
    return torch.randint(500, (batch, TOKENS)), torch.randint(500, (batch, TOKENS))


def sharded(model: Any, replicas: int = 1, **policy: Any) -> Any:
    given = {"mp_policy": MixedPrecisionPolicy(**policy)} if policy else {}
    if replicas > 1:
        given["mesh"] = init_device_mesh("cpu", (replicas, DEVICES // replicas), mesh_dim_names=("a", "b"))
    for block in model.blocks:
        fully_shard(block, **given)
    return fully_shard(model, **given)


adam, momentum = optim.AdamW, functools.partial(optim.SGD, lr=0.1, momentum=0.9)
of_images = functools.partial(samples, (3, 16, 16))
KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], Any, int, tuple[int, int]]] = {
    "mlp": (mlp, functools.partial(samples, (200,)), momentum, 1, (32, 512)),
    "cnn with batch norm": (cnn, of_images, momentum, 1, (16, 64)),
    "transformer": (Transformer, tokens, adam, 1, (4, 16)),
    "accumulation": (mlp, functools.partial(samples, (200,)), adam, 4, (32, 256)),
    "fsdp": (lambda: sharded(Transformer()), tokens, adam, 1, (4, 16)),
    "fsdp, deferred": (lambda: sharded(Transformer()), tokens, adam, 4, (1, 8)),
    "fsdp, not deferred": (lambda: sharded(Transformer()), tokens, adam, 4, (1, 8)),
    "fsdp, kept whole": (lambda: sharded(Transformer()), tokens, adam, 4, (1, 8)),
    "fsdp, replicas": (lambda: sharded(Transformer(), 2), tokens, adam, 4, (1, 8)),
    "fsdp, replicas deferred": (lambda: sharded(Transformer(), 2), tokens, adam, 4, (1, 8)),
    "fsdp in bfloat16": (
        lambda: sharded(Transformer(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        tokens,
        adam,
        1,
        (4, 16),
    ),
    "mlp by autocast": (mlp, functools.partial(samples, (200,)), adam, 1, (32, 256)),
    "mlp of bfloat16": (lambda: mlp().bfloat16(), functools.partial(samples, (200,)), adam, 1, (32, 256)),
    "checkpointing": (lambda: Transformer(checkpoints=True), tokens, adam, 1, (4, 16)),
}


def train(kind: str, batch: int, steps: int) -> None:
    """Train as a user's script does."""
    build, data, optimizer_of, micro_batches, _ = KINDS[kind]
    built = build()
    model = built if kind.startswith("fsdp") else DistributedDataParallel(built)
    dtype = torch.bfloat16 if kind == "mlp of bfloat16" else None
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        gc.collect()  # else what checkpoint leaves behind lives by chance
        with profiler.record_function(f"step {step + 1}"):
            optimizer.zero_grad()
            for number in range(micro_batches):
                last = number == micro_batches - 1
                if kind.startswith("fsdp"):
                    model.set_requires_gradient_sync(last or kind in ("fsdp, not deferred", "fsdp, replicas deferred"))
                    model.set_requires_all_reduce(last or kind != "fsdp, replicas deferred")
                    model.set_reshard_after_backward(last or kind != "fsdp, kept whole")
                else:
                    model.require_backward_grad_sync = last  # as within no_sync()
                inputs, labels = data(batch)
                with torch.autocast("cpu", enabled=kind == "mlp by autocast"):
                    outputs = model(inputs if dtype is None else inputs.to(dtype))
                loss = nn.functional.cross_entropy(outputs.float().flatten(0, -2), labels.flatten())
                del outputs  # as where the model's result has no name
                loss.backward()
            optimizer.step()


def peak_bytes(kind: str, batch: int) -> int:
    """The largest sum of live tensor bytes in steps 3 to 5, counted since before the model was made."""
    gc.collect()
    with profiler.profile(profile_memory=True) as profile:
        train(kind, batch, 5)
    events = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    third_ns = next(event.start_ns() for event in events if event.name() == "step 3")
    live = most = 0
    for event in events:
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live) if event.start_ns() >= third_ns else most
    return most


def profiled(kind: str, batch: int) -> Any:
    recorder = WeighingRecorder(3)
    install(recorder)
    with contextlib.suppress(EnoughSteps):
        train(kind, batch, 20)
    recorder.leave()
    record = codec.convert(script_record(recorder), ScriptRecord)
    return codec.to_builtins(workload_of(recorded_of(record, ScriptRequest(script="train.py", devices=DEVICES))))


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    process_group.answer_for(DEVICES)
    distributed.init_process_group("gloo")
    cases = [(kind, batch) for kind in KINDS for batch in KINDS[kind][-1]]
    peaks = [peak_bytes(*case) for case in cases]  # before anything is put around the scripts
    results: dict[str, list[Any]] = {}
    for (kind, batch), peak in zip(cases, peaks, strict=True):
        results.setdefault(kind, []).append((profiled(kind, batch), peak))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
