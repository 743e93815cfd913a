"""`python -m qarl_nemo.cli` does the same as `python -m qarl_nemo`."""

from qarl_nemo.cli import main

main()
