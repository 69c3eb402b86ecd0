"""``python -m dpsim.testing``."""

import sys

from dpsim.testing import main

sys.exit(main(sys.argv[1:]))
