"""What a config is held against before a start, and an engine once it runs: what is not QaRL, fails, or runs worse."""
