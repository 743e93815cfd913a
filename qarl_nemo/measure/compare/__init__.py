"""`qarl compare`: compares learner and rollout engine, by logprobs and operator by operator."""
