"""What ``explain`` asks of a script, and what it derives from the ranks that were observed."""
