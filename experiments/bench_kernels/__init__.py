"""How fast each implementation of an operation is, beside PyTorch's where that is installed."""
