"""``dpsim bench allreduce``: every allreduce of this machine against the memory's limit, and against its peers."""
