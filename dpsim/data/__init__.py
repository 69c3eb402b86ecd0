"""Data sets, and which samples of a step belong to which device."""

from dpsim.data.dataset import Dataset
from dpsim.data.datasets import DATASETS, load_dataset
from dpsim.data.sharding import device_leaves, epoch_batches, leaf_bounds, shard

__all__ = ["DATASETS", "Dataset", "device_leaves", "epoch_batches", "leaf_bounds", "load_dataset", "shard"]
