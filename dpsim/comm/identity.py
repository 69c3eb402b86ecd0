"""placeholder"""

from dpsim.comm import worker


def rank() -> int:
    return int(worker.world().rank)


def size() -> int:
    return int(worker.world().size)


local_rank = rank
local_size = size
