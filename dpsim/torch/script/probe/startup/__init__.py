"""The folder that stands first on the PYTHONPATH of a watched job, with nothing else that the job could import."""
