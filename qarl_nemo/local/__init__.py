"""The embedded engine: the whole method in one process, on a CPU or one GPU."""
