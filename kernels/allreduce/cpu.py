"""The versions for the processes of one machine, in memory that all of them see."""
