"""Bug or rounding: one script on several numbers of ranks, each step from the same state, its gradients compared."""
