"""`python -m triton_specdec`."""

import sys

from .cli import main

sys.exit(main())
