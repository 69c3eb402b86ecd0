"""Strategies in which ranks compute different layers, or parts of layers: pipelines and tensor parallelism."""
