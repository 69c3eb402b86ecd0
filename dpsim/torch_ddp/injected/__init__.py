"""What ``dpsim explain`` lets every Python process of a job load through PYTHONPATH. Loads nothing of dpsim."""
