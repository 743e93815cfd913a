"""What a run writes and shows: mismatch, error tokens, throughput, event files and the HTML report."""
