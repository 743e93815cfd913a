"""`python -m qarl_nemo` is `qarl`, where the command is not installed."""

from qarl_nemo.cli import main

main()
