"""``calibrate``: what collectives cost on this machine, alone and beside computation."""
