"""`qarl compare`: learner against rollout engine, in logprobs and operator by operator."""
