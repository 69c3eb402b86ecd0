"""What runs in the processes of a user's job, whose environment may have PyTorch and nothing that dpsim needs.

It loads the standard library and torch, and of dpsim but the few modules beside this folder that load the standard
library alone (``tests/test_structure.py`` holds the list). Between dpsim's process and those of the job stand:

- ``dpsim profile`` starts ``start.py run_script REQUEST OUTCOME`` with the Python of the job
  (``dpsim.launch.job_python``): files of JSON with the fields of ``dpsim.torch.script.request.ScriptRequest`` and of
  ``dpsim.torch.script.script_record.ScriptOutcome``. What was recorded are sizes, types, order and times; buckets and
  the workload are computed from them in dpsim's process.
- ``dpsim reproduce --torch-script`` starts ``start.py reproduce.ranks FOLDER``: there is a ``RunsRequest``
  (``dpsim.torch.script.reproduce.observation``), and for each run a folder to which its ranks write their steps
  (``reproduce/report.py``). They are compared in dpsim's process.
- ``dpsim explain -- COMMAND`` starts the job as it is, with two variables: ``PYTHONPATH``, which begins with the folder
  ``startup``, so that Python loads its ``sitecustomize`` and that the job's own; and ``DPSIM_WATCH=STEPS:FOLDER``, how
  many steps of a DDP model to watch, and where to leave the record of each rank. ``FOLDER/rank-RANK-PROCESS.json`` has
  what a rank saw, with the fields of ``dpsim.torch.script.watched.WatchedRank``; times are seconds of the machine's
  monotonic clock. It has another name until it is whole. ``reason`` says why there is less than was asked for. dpsim's
  side reads it as a stranger's (``dpsim.torch.script.watch_records``). Nothing else is said: the job's side answers no
  question, prints nothing and raises nothing, and takes itself away.
"""
