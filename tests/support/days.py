"""Another day than today, for what chat templates write."""

from datetime import datetime, timedelta

import pytest


class Tomorrow(datetime):
    """The clock of the day after."""

    @classmethod
    def now(cls, tz=None):
        """Return this time of the next day."""
        return datetime.now(tz) + timedelta(days=1)


def let_a_day_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chat templates write tomorrow's day from now on."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
