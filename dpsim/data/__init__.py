"""Data sets, and which samples of a step belong to which device."""

from dpsim.data.dataset import Dataset
from dpsim.data.datasets import DATASETS, load_dataset
from dpsim.data.sharding import epoch_batches, shard

__all__ = ["DATASETS", "Dataset", "epoch_batches", "load_dataset", "shard"]
