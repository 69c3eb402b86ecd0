"""``python -m dpsim``: the command line."""

from dpsim.cli import main

main()
