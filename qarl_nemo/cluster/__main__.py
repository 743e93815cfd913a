"""See `cli.py`."""

import sys

from qarl_nemo.cluster.cli import main

sys.exit(main())
