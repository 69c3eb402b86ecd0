"""A script as users write it for torchrun: every kind of collective, workers, no_sync, evaluation, a gradient hook."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pictures(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), index % 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert os.environ["LOCAL_RANK"] == "0" and os.environ["MASTER_ADDR"]
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    pair = dist.new_group([0, 1], backend="gloo")
    assert dist.get_world_size(pair) == 2 and dist.new_group([1]) == dist.GroupMember.NON_GROUP_MEMBER
    seed = torch.tensor([3])
    dist.broadcast(seed, src=0)
    torch.manual_seed(int(seed))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    ddp = DDP(model, bucket_cap_mb=0.03)
    ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.Adam(ddp.parameters())
    dataset = Pictures()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler, num_workers=options.workers, drop_last=True)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        ddp.train()
        for number, (pictures, labels) in enumerate(loader):
            last = (number + 1) % options.accumulate == 0
            if last:
                torch.nn.functional.cross_entropy(ddp(pictures), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with ddp.no_sync():
                    torch.nn.functional.cross_entropy(ddp(pictures), labels).backward()
            if number % 5 == 4:
                ddp.eval()
                with torch.no_grad():
                    right = (ddp(pictures).argmax(1) == labels).float().mean()
                dist.all_reduce(right)
                assert 0 <= right / size <= 1
                dist.barrier(group=pair)
                ddp.train()
        try:
            print("epoch", epoch)
        except Exception as error:
            raise SystemExit(3) from error


if __name__ == "__main__":
    main()
