"""`python -m dflash2_lab`."""

import sys

from dflash2_lab.cli import main

sys.exit(main())
