"""The embedded engine: the whole method in one process, on a CPU or one GPU."""

from qarl_nemo.installation import hide_broken_packages

hide_broken_packages()
