"""The allreduce of one node, from the reference to the memory's limit. ``registry.versions`` lists the ladder."""
