"""What a user asks before or after a run: how far learner and engine are apart, how fast they are, what runs here."""

import qarl_nemo.train  # noqa: F401 hides what CPU vLLM brings broken, before anything here imports transformers
