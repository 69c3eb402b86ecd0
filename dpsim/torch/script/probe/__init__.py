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
- ``dpsim sweep --torch-script``, ``dpsim tune`` and ``dpsim explain --torch-script`` start ``start.py in_turns.ranks
  FOLDER``: there are the parts that are visited (``dpsim.torch.script.request.Part``), and the socket on which ranks,
  which are forked from this process, are started, are given their turns, and hand over what they did
  (``in_turns/visit.py``). Samples, rows and tables are kept and computed in dpsim's process.
- ``dpsim explain -- COMMAND`` starts the job as it is, with two variables: ``PYTHONPATH``, which begins with the folder
  ``startup``, so that Python loads its ``sitecustomize`` and that the job's own; and ``DPSIM_WATCH=STEPS:FOLDER``, how
  many steps of a model to watch, and where to leave the record of each rank. ``FOLDER/rank-RANK-PROCESS.json`` has
  what a rank saw, with the fields of ``dpsim.torch.script.watched.WatchedRank``; times are seconds of the machine's
  monotonic clock. It has another name until it is whole. ``reason`` says why there is less than was asked for. dpsim's
  side reads it as a stranger's (``dpsim.torch.script.watch_records``). Once it has computed what they say, it writes
  ``FOLDER/answer.json``: an object of numbers and texts by the names under which a logger shows them
  (``dpsim.report.watch.logged``), empty where nothing was learned. A job that wants it there imports a callback:
  ``from dpsim_callbacks import LightningCallback`` or ``HuggingFaceCallback``. A finder at the end of ``sys.meta_path``
  knows this module by its name alone, and loads a callback's file, and with it the framework, when it is imported; in a
  job started without dpsim this raises ``ImportError``. Rank 0 then looks for the answer at the ends of steps, at most
  once a second. Nothing else is said: the job's side answers no question, prints nothing and raises nothing, and what
  watches takes itself away.
"""
