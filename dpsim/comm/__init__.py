"""Communication between ranks: process groups, transports, allreduce algorithms, progress beside computation."""
