"""The what-if page: the model's own arithmetic in a browser, held equal to ``dpsim.model`` by a test."""
