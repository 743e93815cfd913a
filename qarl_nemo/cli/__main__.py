"""`python -m qarl_nemo.cli`, as `python -m qarl_nemo`."""

from qarl_nemo.cli import main

main()
