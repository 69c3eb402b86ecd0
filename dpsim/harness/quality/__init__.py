"""The quality of training against the local batch, batch norm and the global batch: predicted, then measured."""
