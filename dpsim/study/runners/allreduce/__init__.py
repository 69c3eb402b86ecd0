"""The runner of allreduces: dpsim and its peers, each in processes of its own, are checked and timed at every size."""
