"""`qarl quantize` for containers that have the source tree on PYTHONPATH but not the installed command."""

import sys

from qarl_nemo.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "quantize")
    main()
