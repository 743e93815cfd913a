"""Prompts for a comparison: a file of texts, messages or token ids, or random tokens."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from qarl_nemo.data.records import listed
from qarl_nemo.files import load_json, text_lines
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.train.config import TokenizerConfig
from qarl_nemo.train.prompts import PromptEncoder

DEFAULT_NUM_PROMPTS = 16
_NO_PROMPTS = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".yaml", ".yml")


def make_prompts(
    settings: CompareSettings, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> list[list[int]]:
    """Read the prompts, or draw random tokens other than special ones.

    Args:
        settings: the comparison's settings.
        tokenizer: the model's tokenizer.
        config: the model's config, for its vocabulary and longest sequence.

    Returns:
        Token ids of each prompt.

    Raises:
        ValueError: lines without a prompt, token ids outside the vocabulary, or prompts that are too long; all are
            listed.
    """
    # One token is kept free, because an engine that reads the whole response must be able to add one.
    longest = config.max_position_embeddings - settings.max_new_tokens - 1
    if longest < 1:
        raise ValueError(
            f"max_new_tokens={settings.max_new_tokens} leaves no room for a prompt in the model's "
            f"{config.max_position_embeddings} positions"
        )
    if settings.prompts is not None:
        prompts = _read_prompts(settings.prompts, tokenizer)[: settings.num_prompts]
    elif settings.prompt_tokens > longest:
        # Said once, and before as many are drawn.
        raise ValueError(
            f"prompt_tokens={settings.prompt_tokens}: of the model's {config.max_position_embeddings} positions "
            f"{longest} leave room for max_new_tokens={settings.max_new_tokens}"
        )
    else:
        prompts = _random_prompts(settings, tokenizer, config)
    problems = []
    for number, prompt in enumerate(prompts, 1):
        outside = sorted({token for token in prompt if not 0 <= token < config.vocab_size})
        if outside:
            problems.append(
                f"prompt {number} has token ids {outside} outside the {config.vocab_size} of the vocabulary"
            )
        if len(prompt) > longest:
            problems.append(
                f"prompt {number} has {len(prompt)} tokens, and the model {config.max_position_embeddings} positions: "
                f"{longest} leave room for max_new_tokens={settings.max_new_tokens}"
            )
    if problems:
        raise ValueError("\n  ".join(problems))
    return prompts


def _random_prompts(
    settings: CompareSettings, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> list[list[int]]:
    special = set(tokenizer.all_special_ids)
    known = set(range(min(len(tokenizer), config.vocab_size))) - special
    # A damaged tokenizer may know only special tokens.
    ordinary = torch.tensor(sorted(known or set(range(config.vocab_size)) - special))
    shape = (settings.num_prompts or DEFAULT_NUM_PROMPTS, settings.prompt_tokens)
    generator = torch.Generator().manual_seed(settings.seed)
    return ordinary[torch.randint(len(ordinary), shape, generator=generator)].tolist()


def _read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    suffix = path.suffix.lower()
    if suffix in _NO_PROMPTS:
        # Line by line, what stands around the prompts would be measured in their place.
        raise ValueError(f"{path}: prompts are read from .jsonl, or from text with one a line; write it as .jsonl")
    found, wrong = [], []
    for number, line in enumerate(text_lines(path, "a file of prompts"), 1):
        if not line.strip():
            continue
        value = _parse(line) if suffix == ".jsonl" else line
        if isinstance(value, str | list) and value:
            found.append(value)
        else:
            wrong.append(f"line {number}")
    if wrong:
        raise ValueError(
            f"{path}: a JSON object with prompt_token_ids, prompt (text or messages) or problem is read; "
            + listed({"no prompt": wrong})
        )
    if not found:
        raise ValueError(f"{path} holds no prompt")
    if not tokenizer.chat_template and any(isinstance(value[0], dict) for value in found):
        raise ValueError(
            f"{path} holds messages, and the model's tokenizer has no chat template; write each prompt as text, or as "
            "prompt_token_ids"
        )
    return [value if isinstance(value[0], int) else _encode(value, tokenizer) for value in found]


def _parse(line: str) -> Any:
    try:
        row = load_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    ids = row.get("prompt_token_ids")
    # True and false would count as 1 and 0.
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    value = row.get("prompt", row.get("problem"))
    if isinstance(value, list) and not all(map(_is_message, value)):
        return None
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _encode(prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = prompt if isinstance(prompt, str) else PromptEncoder(tokenizer, TokenizerConfig()).text(tuple(prompt))
    return tokenizer(text, add_special_tokens=False)["input_ids"]
