"""`python -m qarl_nemo.cluster`, see `cli.py`."""

import sys

from qarl_nemo.cluster.cli import main

sys.exit(main())
