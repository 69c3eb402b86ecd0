"""What ``dpsim explain`` lets every Python process of a job load through PYTHONPATH. Loads nothing of dpsim.

The two sides are dpsim's process and those of the job, which may be two environments. Between them stand:

- ``PYTHONPATH``, which begins with this folder, so that Python loads its ``sitecustomize``, and that the job's own.
- ``DPSIM_WATCH=STEPS:FOLDER``: how many steps of a DDP model to watch, and where to leave the record of each rank.
- ``FOLDER/rank-RANK-PROCESS.json``: what a rank saw, with the fields of ``dpsim.torch.script.watched.WatchedRank``;
  times are seconds of the machine's monotonic clock. It has another name until it is whole. ``reason`` says why there
  is less than was asked for. dpsim's side reads it as a stranger's (``dpsim.torch.script.watch_records``).

Nothing else is said: the job's side answers no question, prints nothing and raises nothing, and takes itself away.
"""
