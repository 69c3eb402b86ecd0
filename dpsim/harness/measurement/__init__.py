"""What all measurements share: the measuring loop, the reference computation, statistics, the environment."""
