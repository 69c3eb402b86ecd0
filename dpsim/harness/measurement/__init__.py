"""What all measurements share: the measuring loop, statistics, scatter, the environment."""
