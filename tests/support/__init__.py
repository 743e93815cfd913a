"""What tests share. Modules called `run_*` are programs that tests start as processes of their own (`programs.py`)."""
