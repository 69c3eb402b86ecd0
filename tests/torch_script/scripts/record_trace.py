"""Makes traces/gloo_rank0.json.gz: torchrun --nproc-per-node 2 record_trace.py FILE.json.gz [--no-shapes]."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )
    ddp = DDP(model, bucket_cap_mb=0.012)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=2, warmup=2, active=6, repeat=1),
        record_shapes="--no-shapes" not in sys.argv,
        on_trace_ready=lambda profiler: dist.get_rank() or profiler.export_chrome_trace(sys.argv[1]),
    ) as profiler:
        for pictures, labels in DataLoader(data, 32, drop_last=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(pictures), labels).backward()
            optimizer.step()
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
