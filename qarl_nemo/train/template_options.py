"""The options of a chat template, which it would pass over in silence where they are misspelt."""

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from qarl_nemo.config.problems import hint
from qarl_nemo.train.prompts import PromptEncoder

# What transformers gives every template, and jinja has not.
_GLOBALS: dict[str, Any] = {"raise_exception": None, "strftime_now": None}
_GIVEN = ("messages", "add_generation_prompt")
# A tag of transformers' own.
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def require_options(encoders: Sequence[PromptEncoder]) -> None:
    """Require that a template reads each of `chat_template_kwargs`.

    Args:
        encoders: those of all models that are asked the same; what one of them reads may mean nothing to the others.

    Raises:
        ValueError: no template reads an option; all are listed, with those that are read.
    """
    given = dict.fromkeys(key for one in encoders for key in one.settings.chat_template_kwargs)
    read = [_options(one.tokenizer) if one.template else [] for one in encoders] if given else [None]
    if None in read:
        return
    legal = sorted({option for options in read if options for option in options})
    unread = [key for key in given if key not in legal]
    if not unread:
        return
    if any(one.template for one in encoders):
        told = [f"the chat template does not read it; {hint(key, legal or ['none'])}" for key in unread]
    else:
        told = ["there is no chat template to read it; leave it out"] * len(unread)
    raise ValueError("\n  ".join(f"chat_template_kwargs.{key}: {why}" for key, why in zip(unread, told, strict=True)))


def _options(tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """Return the names that the template looks up and nothing else gives it; None if it cannot be read."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.globals.update(_GLOBALS)
    try:
        template = environment.parse(_GENERATION.sub("", tokenizer.get_chat_template()))
    except TemplateError:
        # Writing the first prompt says why.
        return None
    given = {*_GIVEN, *tokenizer.special_tokens_map}
    return [name for name in meta.find_undeclared_variables(template) if name not in given]
