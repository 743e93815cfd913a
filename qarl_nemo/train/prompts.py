"""Prompts as the model sees them: the tokenizer's chat template, and how long a prompt may be."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from qarl_nemo.config.problems import attempt
from qarl_nemo.data.problems import Messages, Task
from qarl_nemo.files import read_words
from qarl_nemo.train.config import LocalConfig, TokenizerConfig
from qarl_nemo.train.tasks import TaskSource

DEFAULT_TEMPLATE = "default"
_MAX_QUOTED, _NUM_ANSWERS = 200, 64


class PromptEncoder:
    """Writes prompts in the tokenizer's chat template and makes tokens of them.

    Args:
        tokenizer: the model's; a template of the config's own becomes its template, and is saved with it.
        settings: the tokenizer block.
        key: where the user sets the template, for errors.
        none: what stands there for no template.

    Raises:
        ValueError: the template's file cannot be read, or is empty.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: TokenizerConfig,
        *,
        key: str = "policy.tokenizer.chat_template",
        none: str = "null",
    ) -> None:
        self.tokenizer, self.settings, self._key, self._none = tokenizer, settings, key, none
        template = settings.chat_template
        if template is not None and template != DEFAULT_TEMPLATE:
            is_file = template.endswith(".jinja")
            tokenizer.chat_template = read_words(Path(template), "a chat template") if is_file else template
            if not tokenizer.chat_template.strip():
                raise ValueError(f"{template}: expected a chat template, but it is empty")
        self._has_template = template is not None and bool(tokenizer.chat_template)

    @property
    def template(self) -> Any:
        """The chat template in use, or several by name; None for none."""
        return self.tokenizer.chat_template if self._has_template else None

    def text(self, prompt: str | Messages) -> str:
        """Return a prompt as the model sees it.

        Args:
            prompt: text, which is a user's message where there is a template, or messages.

        Raises:
            ValueError: messages without a template, or ones that the template refuses or leaves out.
        """
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        if self.settings.chat_template is None or (isinstance(prompt, str) and not self._has_template):
            return "".join(message["content"] for message in messages)
        if not self._has_template:
            raise ValueError(
                "the data holds chat messages, or has a system_prompt, but the tokenizer has no chat_template; set "
                f"{self._key} to one, or to {self._none}, which joins the messages' texts"
            )
        another = f"{self._key} sets another one, {self._none} none"
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False, **self.settings.chat_template_kwargs
            )
        except Exception as error:  # a template is a program of others
            name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ValueError(
                f"the chat template refuses the messages {str(messages)[:_MAX_QUOTED]}: {name}{error}; {another}"
            ) from error
        assert isinstance(text, str), "without tokenize, templates give text"
        if not text:
            raise ValueError(
                f"the chat template writes nothing of the messages {str(messages)[:_MAX_QUOTED]}; {another}"
            )
        left_out = _left_out(messages, text)
        if left_out is not None:
            raise ValueError(
                f"the chat template leaves out the message of the role {left_out['role']!r}: "
                f"{left_out['content'][:_MAX_QUOTED]!r}; give it a role that the template writes (system, user), or "
                f"leave it out; {another}"
            )
        return text

    def __call__(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Tokenize the tasks' prompts.

        Returns:
            One list of token ids for each task.

        Raises:
            ValueError: as `text`; or the tokenizer makes no token of a prompt.
        """
        texts = [self.text(task.prompt) for task in tasks]
        # The template writes all special tokens that the model expects.
        prompts = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        empty = [text for text, tokens in zip(texts, prompts, strict=True) if not tokens]
        if empty:
            raise ValueError(
                f"the tokenizer makes no token of {len(empty)} of {len(texts)} prompts, such as "
                f"{empty[0][:_MAX_QUOTED]!r}; leave them out, or use the tokenizer that the model was trained with"
            )
        return prompts


def _left_out(messages: Sequence[Mapping[str, str]], text: str) -> Mapping[str, str] | None:
    """Return a message that a template did not write, as most do not under a role that they do not know."""
    written = "".join(text.split())
    # Of earlier answers templates leave out the reasoning.
    asked = (message for message in messages if message["role"] != "assistant")
    return next((message for message in asked if "".join(message["content"].split()) not in written), None)


def longest_prompt(config: LocalConfig, max_position_embeddings: int) -> int:
    """Return how many tokens a prompt may have.

    Args:
        config: the resolved config.
        max_position_embeddings: the model's longest sequence, tokens.

    Returns:
        `data.max_input_seq_length`, or what the model or its engine leaves beside the response.

    Raises:
        ValueError: there is no room for a prompt, or not as much as `data.max_input_seq_length`.
    """
    engine = getattr(config.rollout, "max_model_len", None)
    longest = min(max_position_embeddings, engine or max_position_embeddings)
    room = longest - config.rollout.max_new_tokens
    wanted = getattr(config.data, "max_input_seq_length", None)
    if room < (wanted or 1):
        limit = "rollout.max_model_len" if longest == engine else "the model's positions"
        asked = f" and data.max_input_seq_length={wanted}" if wanted else ""
        raise ValueError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}{asked} exceed {limit}, {longest} tokens for "
            "prompt and response"
        )
    return wanted or room


def limit_prompts(source: TaskSource, encode: PromptEncoder, longest: int, *, skip: bool) -> dict[str, int]:
    """Refuse or leave out prompts that are too long.

    Args:
        source: the tasks; shortened in place.
        encode: makes their tokens.
        longest: how many tokens a prompt may have.
        skip: leave them out.

    Returns:
        How many were left out, by the key of the data block.

    Raises:
        ValueError: there are such prompts and `skip` is false, or no others; or the encoder refuses prompts. Those of
            every key are told.
    """
    skipped: dict[str, int] = {}
    problems: list[str] = []
    for key, tasks in source.tasks.items():
        kept = attempt(problems, _short, key, tasks, encode, longest, skip=skip)
        if kept is not None:
            skipped[key], source.tasks[key] = len(tasks) - len(kept), kept
    if problems:
        # A template that refuses messages does so for all keys.
        raise ValueError("\n  ".join(dict.fromkeys(problems)))
    if not any(source.tasks.values()):
        _require_short(source, encode, longest)
    return skipped


def require_room_for_answers(source: TaskSource, encode: PromptEncoder, max_new_tokens: int) -> None:
    """Refuse arithmetic most of whose answers are longer than a response may be.

    Args:
        source: the tasks.
        encode: whose tokenizer counts.
        max_new_tokens: the longest response, tokens.

    Raises:
        ValueError: it is so; hardly any response could earn a reward.
    """
    if any(source.tasks.values()):
        return
    answers = sorted((task.answer for task in source.train(1, _NUM_ANSWERS)), key=len)
    lengths = list(map(len, encode.tokenizer(answers, add_special_tokens=False)["input_ids"]))
    if statistics.median(lengths) > max_new_tokens:
        raise ValueError(
            f"most answers of data.source=arithmetic have more than rollout.max_new_tokens={max_new_tokens} tokens, "
            f"such as {answers[-1]!r} with {lengths[-1]}, and a response that is cut off earns nothing; set "
            f"rollout.max_new_tokens={max(lengths) + 1}, or data.digits, data.num_terms or data.answer_digits lower"
        )


def _require_short(source: TaskSource, encode: PromptEncoder, longest: int) -> None:
    # Made as they are needed, all with as many characters; an engine would cut their responses short without a word.
    (task,) = source.train(1, 1)
    (tokens,) = encode([task])
    if len(tokens) > longest:
        raise ValueError(
            f"the prompts of data.source=arithmetic have {len(tokens)} tokens ({str(task.prompt)[:_MAX_QUOTED]!r}), "
            f"and there is room for {longest} beside the response; set rollout.max_new_tokens, data.digits or "
            "data.num_terms lower, or rollout.max_model_len, if it is set, higher"
        )


def _short(key: str, tasks: list[Task], encode: PromptEncoder, longest: int, *, skip: bool) -> list[Task]:
    """Return a key's tasks whose prompts are short enough."""
    lengths = list(map(len, encode(tasks)))
    kept = [task for task, length in zip(tasks, lengths, strict=True) if length <= longest]
    if len(kept) < len(tasks) and not (skip and kept):
        quoted = str(tasks[lengths.index(max(lengths))].prompt)[:_MAX_QUOTED]
        others = ", or data.overlong_prompts=skip to leave them out" if kept else ""
        raise ValueError(
            f"{len(tasks) - len(kept)} of the {len(tasks)} prompts of data.{key} have more than {longest} tokens, the "
            f"longest {max(lengths)} ({quoted!r}); set data.max_input_seq_length or rollout.max_new_tokens to "
            f"other lengths{others}"
        )
    return kept
