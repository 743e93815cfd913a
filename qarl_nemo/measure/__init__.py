"""Answers a user's questions around a run: how far apart are learner and engine, how fast are they, what runs here."""

import qarl_nemo.train  # noqa: F401 hides what CPU vLLM brings broken, before anything here imports transformers
