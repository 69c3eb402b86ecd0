"""What ``dpsim watch`` lets every Python process of a job load through PYTHONPATH. Loads nothing of dpsim."""
