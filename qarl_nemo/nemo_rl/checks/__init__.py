"""What a config is held against before anything starts: what would not be QaRL, not run, or run worse."""
