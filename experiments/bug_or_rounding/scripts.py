"""The scripts: one ordinary training with DDP or FSDP, and what each case has in place of a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dpsim.torch_ddp.reproduce import differences

_SCRIPT = """\
import os, random
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

{top}

def main(rank, world):
    {start}
    torch.manual_seed(1)
    {data}
    {sampler}
    {loader}
    {model}
    {wrap}
    {optimizer}
    {more}
    for epoch in range(4):
        {epoch}
        for number, batch in enumerate(loader):
            x, y = batch
            {step}

if __name__ == "__main__":
    {run}
"""

_PARTS = {
    "top": "",
    "start": "dist.init_process_group('gloo')",
    "data": "data = TensorDataset(torch.randn(128, 16), torch.randint(0, 5, (128,)))",
    "sampler": "sampler = DistributedSampler(data)",
    "loader": "loader = DataLoader(data, batch_size=32, sampler=sampler)",
    "model": "model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5))",
    "wrap": "model = DDP(model)",
    "optimizer": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "more": "",
    "epoch": "getattr(sampler, 'set_epoch', int)(epoch)",
    "step": """\
optimizer.zero_grad()
loss = F.cross_entropy(model(x), y)
loss.backward()
optimizer.step()""",
    "run": "main(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))",
}
_INDENTED = {"step": 12, "epoch": 8} | dict.fromkeys(
    ("start", "data", "sampler", "loader", "model", "wrap", "optimizer", "more", "run"), 4
)


@dataclass(frozen=True)
class Case:
    """A script by the parts that differ from the ordinary one, and the class that should be named ("" for none)."""

    name: str
    parts: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    design: str = ""

    @property
    def script(self) -> str:
        """The text of the script."""
        parts = _PARTS | dict(self.parts)
        return _SCRIPT.format(
            **{name: text.replace("\n", "\n" + " " * _INDENTED.get(name, 0)) for name, text in parts.items()}
        )


_PICTURES = "data = TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(0, 5, (96,)))"
_TOKENS = "t = torch.randint(0, 30, (96, 12))\ndata = TensorDataset(t, t.roll(-1, 1))"
_CONV = (
    "model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), {norm}, nn.ReLU(), nn.MaxPool2d(2),"
    " nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))"
)
_NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}
    def forward(self, x):
        {forward}"""
_GPT = _NET.format(
    layers="""self.embed = nn.Embedding(30, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 30)""",
    forward="""mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.block(self.embed(x), src_mask=mask, is_causal=True))""",
)
_CENTRED = _NET.format(
    layers="""self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 5)
        self.register_buffer('centre', torch.zeros(32))""",
    forward="""h = self.body(x)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.head((h - self.centre).relu())""",
)
_TOKEN_STEP = """\
optimizer.zero_grad()
loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(){more})
loss.backward()
optimizer.step()"""
_AFTER = """\
optimizer.zero_grad()
loss = F.cross_entropy(model(x), y)
loss.backward()
{before}
optimizer.step()
{after}"""
_DRAWN = "x = torch.randn(8, 16)\n" + _PARTS["step"].replace("y)", "x.abs()[:, :5].softmax(1))")
_ACCUMULATE = """\
last = number % 2 == 1
model.require_backward_grad_sync = {sync}
(F.cross_entropy(model(x), y) / 2).backward()
if last:
    optimizer.step()
    optimizer.zero_grad()"""

_SHARD = "from torch.distributed.fsdp import fully_shard"


def _fsdp(name: str, parts: Mapping[str, str], kind: str = "", design: str = "") -> Case:
    """A case whose layers and model are given to ``fully_shard``."""
    sharded = {"wrap": "fully_shard(model[0])\nfully_shard(model[2])\nfully_shard(model)"} | dict(parts)
    return Case(f"FSDP: {name}", sharded | {"top": f"{_SHARD}\n{parts.get('top', '')}"}, kind, design)


_TWO_HALVES = {
    "model": "body, head = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 5)",
    "optimizer": "optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)",
}
_UNEQUAL_TOKENS = {
    "data": _TOKENS + "\nfor row in range(96):\n    data.tensors[1][row, : torch.randint(1, 11, ())] = -100",
    "model": "model = Net()",
    "step": _TOKEN_STEP.format(more=", ignore_index=-100"),
}

MISTAKES = (
    Case("no sampler", {"sampler": "sampler = None"}, differences.REPEATED),
    Case(
        "shuffled by the rank's seed",
        {"sampler": "sampler = RandomSampler(data, generator=torch.Generator().manual_seed(rank))"},
        differences.SEEDS,
    ),
    Case(
        "a DistributedSampler with the rank's seed",
        {"sampler": "sampler = DistributedSampler(data, seed=rank)", "loader": _PARTS["loader"].replace("32", "4")},
        differences.SEEDS,
    ),
    Case(
        "a method of the module",
        {
            "top": _NET.format(
                layers="self.head = nn.Linear(16, 5)",
                forward="return self.head(x)\n"
                "    def loss(self, x, y):\n        return F.cross_entropy(F.linear(x, self.head.weight), y)",
            ),
            "model": "model = Net()",
            "step": _PARTS["step"].replace("F.cross_entropy(model(x), y)", "model.module.loss(x, y)"),
        },
        differences.MISSING,
    ),
    Case("one seed for the batches that all ranks draw", {"step": _DRAWN}, differences.REPEATED),
    Case(
        "the last batch is padded",
        {"data": "data = TensorDataset(torch.randn(93, 16), torch.randint(0, 5, (93,)))"},
        differences.PADDED,
    ),
    Case(
        "rank 0 takes more samples",
        {
            "sampler": """\
order = torch.randperm(128, generator=torch.Generator().manual_seed(3)).tolist()
cut = lambda share: len(share) if world == 1 else 20
batches = [order[i:i + 32] for i in range(0, 128, 32)]
sampler = [b[:cut(b)] if rank == 0 else b[cut(b):] for b in batches]""",
            "loader": "loader = DataLoader(data, batch_sampler=sampler)",
        },
        differences.SHARES,
    ),
    Case(
        "a mean over unequal numbers of tokens",
        {"top": _GPT} | _UNEQUAL_TOKENS,
        differences.SHARES,
    ),
    Case(
        "a sum as the loss",
        {"step": _PARTS["step"].replace("(model(x), y)", "(model(x), y, reduction='sum') / 32")},
        differences.SCALE,
    ),
    Case(
        "a centre of each rank's own",
        {"top": _CENTRED, "model": "model = Net()", "wrap": "model = DDP(model, broadcast_buffers=False)"},
        differences.BUFFERS,
    ),
    Case(
        "running statistics of each rank's own",
        {
            "data": _PICTURES,
            "model": _CONV.format(norm="nn.BatchNorm2d(8)"),
            "wrap": "model = DDP(model, broadcast_buffers=False)",
        },
        differences.BUFFERS,
    ),
    Case(
        "a hook that divides what is being sent",
        {
            "top": """\
def hook(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    for part in bucket.buffer().chunk(8):
        part.div_(dist.get_world_size())
    return future.then(lambda done: done.value()[0])""",
            "model": "model = nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(),"
            " nn.Linear(512, 5))",
            "wrap": "model = DDP(model)\nif world > 1:\n    model.register_comm_hook(None, hook)",
        },
        differences.OVERWRITTEN,
    ),
    Case(
        "a head outside of DDP",
        _TWO_HALVES | {"wrap": "body = DDP(body)\nmodel = lambda x: head(body(x))"},
        differences.MISSING,
    ),
    Case(
        "no_sync in the last micro-batch",
        {"loader": _PARTS["loader"].replace("32", "16"), "step": _ACCUMULATE.format(sync="not last")},
        differences.MISSING,
    ),
    Case(
        "a head that is drawn by each rank's seed",
        {
            "model": "body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())\ntorch.manual_seed(rank)\n"
            "head = nn.Linear(32, 5)",
            "wrap": "body = DDP(body)\nmodel = lambda x: head(body(x))",
            "optimizer": "optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)",
            "step": _AFTER.format(
                before="for each in head.parameters():\n    dist.all_reduce(each.grad)\n    each.grad /= world",
                after="",
            ),
        },
        differences.SEEDS,
    ),
    _fsdp(
        "a mean over unequal numbers of tokens",
        {"top": _GPT, "wrap": "fully_shard(model.block)\nfully_shard(model)"} | _UNEQUAL_TOKENS,
        differences.SHARES,
    ),
    _fsdp("no sampler", {"sampler": "sampler = None"}, differences.REPEATED),
    _fsdp(
        "the last batch is padded",
        {"data": "data = TensorDataset(torch.randn(93, 16), torch.randint(0, 5, (93,)))"},
        differences.PADDED,
    ),
    _fsdp(
        "parameters that are drawn by each rank's seed",
        {"model": "torch.manual_seed(rank)\n" + _PARTS["model"]},
        differences.SEEDS,
    ),
    _fsdp(
        "gradients that are divided by 1",
        {
            "more": "for unit in (model[0], model[2], model):\n    unit.set_force_sum_reduction_for_comms(True)\n"
            "    unit.set_gradient_divide_factor(1.0)",
        },
        differences.SCALE,
    ),
    _fsdp(
        "a head that is not sharded",
        _TWO_HALVES | {"wrap": "fully_shard(body)\nmodel = lambda x: head(body(x))"},
        differences.MISSING,
    ),
    _fsdp(
        "the norm of a rank's own shards clipped",
        {
            "step": _AFTER.format(
                before="shards = [each.grad.to_local() for each in model.parameters()]\n"
                "norm = torch.stack([each.norm() for each in shards]).norm()\n"
                "for each in shards:\n    each.mul_(0.1 / norm)",
                after="",
            )
        },
        differences.OWN_NORM,
    ),
    _fsdp(
        "running statistics of each rank's own",
        {"data": _PICTURES, "model": _CONV.format(norm="nn.BatchNorm2d(8)"), "wrap": "fully_shard(model)"},
        differences.BUFFERS,
    ),
)

BY_DESIGN = (
    Case(
        "batches that the loop draws by the rank's seed",
        {"more": "torch.manual_seed(rank)", "step": _DRAWN},
        differences.OTHER_SAMPLES,
    ),
    Case(
        "batches that the loop draws without a seed",
        {
            "more": "torch.default_generator.set_state(unseeded)",
            "top": "unseeded = torch.get_rng_state()",
            "step": _DRAWN,
        },
        differences.OTHER_SAMPLES,
    ),
    Case("local batch norm", {"data": _PICTURES, "model": _CONV.format(norm="nn.BatchNorm2d(8)")}, design="batch norm"),
    Case(
        "dropout inside of an LSTM",
        {
            "top": _NET.format(
                layers="self.rnn, self.head = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 5)",
                forward="return self.head(self.rnn(x.view(-1, 4, 4))[0][:, -1])",
            ),
            "model": "model = Net()",
        },
        differences.RANDOM,
    ),
    Case(
        "noise that the loop adds by rank",
        {"more": "torch.manual_seed(rank)", "step": "x = x + 0.1 * torch.randn(x.shape)\n" + _PARTS["step"]},
        differences.RANDOM,
    ),
)


def _optimizer(text: str) -> dict[str, str]:
    return {"optimizer": f"optimizer = torch.optim.{text}"}


CLEAN = (
    Case("the ordinary script"),
    Case("SGD with Nesterov, a step scheduler", {
        **_optimizer("SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)"),
        "more": "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
        "step": _AFTER.format(before="", after="scheduler.step()"),
    }),
    Case("Adam, the norm clipped", {
        **_optimizer("Adam(model.parameters(), lr=1e-2)"),
        "step": _AFTER.format(before="nn.utils.clip_grad_norm_(model.parameters(), 0.1)", after=""),
    }),
    Case("AdamW, cosine, values clipped", {
        **_optimizer("AdamW(model.parameters(), lr=1e-2)"),
        "more": "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)",
        "step": _AFTER.format(before="nn.utils.clip_grad_value_(model.parameters(), 0.01)", after="scheduler.step()"),
    }),
    Case("RMSprop, label smoothing", {
        **_optimizer("RMSprop(model.parameters(), lr=1e-3)"),
        "step": _PARTS["step"].replace("y)", "y, label_smoothing=0.1)"),
    }),
    Case("Adagrad, two groups", _optimizer("Adagrad([{'params': model.module[0].parameters(), 'lr': 0.01},"
                                           " {'params': model.module[2:].parameters()}], lr=0.1)")),
    Case("accumulation by no_sync", {
        "loader": _PARTS["loader"].replace("32", "16"), "step": _ACCUMULATE.format(sync="last")}),
    Case("accumulation that always synchronises", {
        "loader": _PARTS["loader"].replace("32", "16"), "step": _ACCUMULATE.format(sync="True")}),
    Case("group norm, channel dropout", {
        "data": _PICTURES,
        "model": _CONV.format(norm="nn.GroupNorm(2, 8)").replace("nn.Flatten()", "nn.Dropout2d(0.2), nn.Flatten()"),
    }),
    Case("a transformer with dropout, one cycle", {
        "top": _GPT, "data": _TOKENS, "model": "model = Net()", "step": _TOKEN_STEP.format(more=""),
        **_optimizer("AdamW(model.parameters(), lr=1e-3)"),
        "more": "scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)",
    }),
    Case("an LSTM", {
        "top": _NET.format(layers="self.rnn, self.head = nn.LSTM(4, 8, 2, batch_first=True), nn.Linear(8, 5)",
                           forward="return self.head(self.rnn(x.view(-1, 4, 4))[0][:, -1])"),
        "model": "model = Net()",
    }),
    Case("a variational autoencoder", {
        "top": _NET.format(
            layers="self.encode, self.decode = nn.Linear(16, 16), nn.Linear(8, 16)",
            forward="m, s = self.encode(x).chunk(2, 1)\n        return self.decode(m + s.exp() * torch.randn_like(s))",
        ),
        "model": "model = Net()",
        "step": _PARTS["step"].replace("F.cross_entropy(model(x), y)", "F.mse_loss(model(x), x)"),
    }),
    Case("residual blocks that are dropped by sample", {
        "top": _NET.format(
            layers="self.first, self.block, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 5)",
            forward="h = self.first(x).relu()\n        keep = h.new_empty(len(h), 1).bernoulli_(0.8) / 0.8\n"
            "        return self.head(h + keep * self.block(h).relu())",
        ),
        "model": "model = Net()",
    }),
    Case("binary cross entropy, weight norm, by spawn", {
        "start": "os.environ['RANK'] = str(rank)\ndist.init_process_group('gloo', rank=rank, world_size=world)",
        "model": "first = nn.utils.parametrizations.weight_norm(nn.Linear(16, 24))\n"
                 "model = nn.Sequential(first, nn.Tanh(), nn.Linear(24, 1))",
        "step": _PARTS["step"].replace(
            "F.cross_entropy(model(x), y)", "F.binary_cross_entropy_with_logits(model(x)[:, 0], (y > 2).float())"),
        "run": "world = int(os.environ['WORLD_SIZE'])\nmp.spawn(main, args=(world,), nprocs=world)",
    }),
    Case("augmentation in workers", {
        "top": "class Noisy(Dataset):\n    def __init__(self, data):\n        self.data = data\n"
               "    def __len__(self):\n        return len(self.data)\n"
               "    def __getitem__(self, i):\n        x, y = self.data[i]\n"
               "        return x + 0.1 * torch.randn(16) * random.random(), y",
        "data": _PARTS["data"] + "\ndata = Noisy(data)",
        "loader": "loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=1)",
    }),
    Case("a random sampler on one device alone", {
        "sampler": "sampler = DistributedSampler(data) if world > 1 else RandomSampler(data)"}),
    Case("a hook that sends 16 bits, a bucket view", {
        "top": "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook",
        "wrap": "model = DDP(model, gradient_as_bucket_view=True, static_graph=True)\n"
                "model.register_comm_hook(None, fp16_compress_hook)",
    }),
    Case("autocast and a scaler of gradients", {
        "more": "scaler = torch.amp.GradScaler('cpu')",
        "step": "optimizer.zero_grad()\nwith torch.autocast('cpu', torch.bfloat16):\n"
                "    loss = F.cross_entropy(model(x), y)\nscaler.scale(loss).backward()\nscaler.step(optimizer)\n"
                "scaler.update()",
    }),
    Case("a part that is unused now and then", {
        "top": _NET.format(layers="self.a, self.b, self.n = nn.Linear(16, 5), nn.Linear(16, 5), 0",
                           forward="self.n += 1\n        return self.a(x) if self.n % 3 else self.a(x) + self.b(x)"),
        "model": "model = Net()",
        "wrap": "model = DDP(model, find_unused_parameters=True)",
    }),
    Case("a weighted sampler of each rank", {
        "sampler": "generator = torch.Generator().manual_seed(rank)\n"
                   "sampler = torch.utils.data.WeightedRandomSampler(torch.rand(128), 128 // world, True, generator)",
    }),
    Case("a loss that is not a number", {"step": _PARTS["step"].replace("model(x)", "model(x).log()")}),
    Case("the script divides its batches itself", {
        "sampler": "sampler = RandomSampler(data, generator=torch.Generator().manual_seed(2))",
        "step": "x, y = x[rank::world], y[rank::world]\n" + _PARTS["step"],
    }),
    _fsdp("several units, AdamW, the norm clipped", {
        **_optimizer("AdamW(model.parameters(), lr=1e-2)"),
        "step": _AFTER.format(before="nn.utils.clip_grad_norm_(model.parameters(), 0.1)", after=""),
    }),
    _fsdp("parameters that stay after forward", {
        "wrap": "fully_shard(model[0], reshard_after_forward=False)\nfully_shard(model, reshard_after_forward=False)",
    }),
    _fsdp("accumulation that reduces last, evaluation in between", {
        "loader": _PARTS["loader"].replace("32", "16"),
        "step": _ACCUMULATE.format(sync="True").replace(
            "model.require_backward_grad_sync = True",
            "with torch.no_grad():\n    model.eval()(x)\nmodel.train().set_requires_gradient_sync(last)"),
    }),
    _fsdp("accumulation that always reduces", {
        "loader": _PARTS["loader"].replace("32", "16"), "step": _ACCUMULATE.format(sync="True")}),
    _fsdp("a transformer with dropout, a checkpoint that is loaded", {
        "top": _GPT + "\nfrom torch.distributed.checkpoint import state_dict as states",
        "data": _TOKENS, "model": "torch.manual_seed(rank)\nmodel = Net()\nwhole = Net().state_dict()",
        "wrap": "fully_shard(model.block)\nfully_shard(model)\noptions = states.StateDictOptions("
                "full_state_dict=True, broadcast_from_rank0=True)\n"
                "states.set_model_state_dict(model, whole, options=options)",
        "step": _TOKEN_STEP.format(more=""),
        **_optimizer("AdamW(model.parameters(), lr=1e-3)"),
    }),
)  # fmt: skip
