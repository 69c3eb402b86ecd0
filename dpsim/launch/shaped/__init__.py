"""Hosts for ranks on this machine: network namespaces, whose links the kernel shapes."""
