"""Communication between ranks: process groups, transports, allreduce algorithms, progress during computation."""
