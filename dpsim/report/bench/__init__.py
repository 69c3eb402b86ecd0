"""The report of an allreduce benchmark."""
