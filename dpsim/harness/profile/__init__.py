"""``profile``: how long each layer of a model takes on this machine."""
