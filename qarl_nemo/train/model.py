"""The learner's model: a local checkpoint of a supported family, or a tiny random one with its tokenizer."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
)
from transformers.utils import logging as transformers_logging

from qarl_nemo.architecture import CONFIG_FILE, read_architecture
from qarl_nemo.checkpoints import open_checkpoint
from qarl_nemo.checkpoints.content import require_whole
from qarl_nemo.checkpoints.hints import folder_hint, no_folder
from qarl_nemo.files import FileError, read_json
from qarl_nemo.train.config import ModelInit, PolicyConfig
from qarl_nemo.train.engine_forward import follow_engine
from qarl_nemo.train.tokenizer import character_tokenizer

# transformers' progress bars for single shards would garble the run's own.
transformers_logging.disable_progress_bar()

_GENERATION = "generation_config.json"
_MAX_QUOTED = 500
# What holds the words of the supported families' tokenizers, and says how they are split.
_WORDS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_model(
    policy: PolicyConfig, device: torch.device, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load or make the model and its tokenizer.

    Args:
        policy: the policy block.
        device: where the parameters go.
        seed: seeds a random model's weights.

    Returns:
        The model in the configured precision, and its tokenizer. A checkpoint that stays frozen is not read yet, and
        the model is empty, on the meta device: `packed_base` fills it layer by layer once its layers are aligned.

    Raises:
        ValueError: the directory is not a checkpoint of a supported model type.
    """
    dtype = getattr(torch, policy.precision)
    if policy.model_init is not None:
        tokenizer = character_tokenizer()
        torch.manual_seed(seed)
        # Built in its dtype, because a cast would also round the rotary frequencies, which must stay FP32.
        model = follow_engine(AutoModelForCausalLM.from_config(tiny_config(policy.model_init, tokenizer), dtype=dtype))
    else:
        assert policy.model_path is not None
        if policy.lora is not None or is_packed(policy.model_path):
            return _empty_model(policy, dtype), load_tokenizer(policy.model_path)
        model, tokenizer = load_checkpoint(policy.model_path, dtype)
    return model.to(device), tokenizer


def is_packed(path: Path | None) -> bool:
    """Return whether a folder's config.json says that it is quantized; None, for a random model, is not."""
    if path is None or not (path / CONFIG_FILE).is_file():
        return False
    return bool(read_json(path / CONFIG_FILE, "a model's config.json").get("quantization_config"))


def _empty_model(policy: PolicyConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on the meta device, without memory for its parameters."""
    with torch.device("meta"):
        model = follow_engine(AutoModelForCausalLM.from_config(read_config(policy), dtype=dtype))
    if policy.model_path and (policy.model_path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(policy.model_path, local_files_only=True)
    # Without dropout, as a loaded one.
    return model.eval()


def read_config(policy: PolicyConfig) -> PreTrainedConfig:
    """Return the model's config without its weights.

    Raises:
        ValueError: the directory is not a checkpoint of a supported model type.
    """
    if policy.model_init is not None:
        return tiny_config(policy.model_init, character_tokenizer())
    assert policy.model_path is not None
    if not policy.model_path.exists():
        raise FileError(
            f"there is no {policy.model_path}: set policy.model_path to a Hugging Face checkpoint's folder"
            f"{folder_hint(policy.model_path)}"
        )
    config = checkpoint_config(policy.model_path)
    # The layers are ours; transformers would install its own.
    config.__dict__.pop("quantization_config", None)
    return config


def read_tokenizer(policy: PolicyConfig) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer without its weights.

    Returns:
        The tokenizer, which pads with its end token if it has no pad token.

    Raises:
        ValueError: it cannot be loaded, or has no end token.
    """
    return character_tokenizer() if policy.model_path is None else load_tokenizer(policy.model_path)


def load_checkpoint(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a checkpoint directory from disk, safetensors only.

    Args:
        path: the directory.
        dtype: dtype of the parameters.

    Returns:
        The model and its tokenizer, which pads with its end token if it has no pad token.

    Raises:
        ValueError: no such directory, an unsupported model type, tensors that do not belong to the model, or a
            tokenizer without an end token.
    """
    checkpoint_config(path)
    require_whole(open_checkpoint(path))
    with _named_errors(path, "its weights cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, use_safetensors=True)
    return follow_engine(model), load_tokenizer(path)


def load_tokenizer(path: Path, model: Path | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from disk.

    Args:
        path: the directory.
        model: the checkpoint directory of its model; None: the same one.

    Returns:
        The tokenizer, which pads with its end token if it has no pad token.

    Raises:
        ValueError: it cannot be loaded, knows no words, has no end token, or tokens that the model does not know.
    """
    vocab_size = checkpoint_config(model or path).vocab_size
    found = [name for name in _TOKENIZER_FILES if (path / name).exists()]
    for name in found:
        # transformers names no file that it cannot read.
        read_json(path / name, "a tokenizer's settings")
    tokenizer: Any = None
    if any((path / name).exists() for name in _WORDS):
        with _named_errors(path, f"its tokenizer ({', '.join(found)}) cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer is None or not tokenizer("a 1", add_special_tokens=False)["input_ids"]:
        # Without its files transformers makes one that reads every prompt as nothing.
        raise FileError(
            f"{path}: its tokenizer knows no words; the folder lacks tokenizer.json (or vocab.json and merges.txt, or "
            "tokenizer.model)"
        )
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise FileError(f"{path}: its tokenizer has token {largest}, its model only {vocab_size} tokens")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {path} has no eos_token, so that no response could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def checkpoint_config(path: Path) -> PreTrainedConfig:
    """Read the config of a checkpoint directory.

    Raises:
        ValueError: the directory is not a checkpoint of a supported model type; says what it may be instead.
    """
    if absent := no_folder(path):
        raise FileError(f"no Hugging Face checkpoint: {absent}")
    if not (path / CONFIG_FILE).exists():
        raise ValueError(
            f"{path} is not a Hugging Face checkpoint directory: it has no {CONFIG_FILE}{folder_hint(path)}"
        )
    read_architecture(path)
    if (path / _GENERATION).exists():
        # transformers passes over one that it cannot read, and answers would end elsewhere.
        read_json(path / _GENERATION, "a model's generation_config.json")
    return AutoConfig.from_pretrained(path, local_files_only=True)


@contextlib.contextmanager
def _named_errors(path: Path, problem: str) -> Iterator[None]:
    """Turn the unrelated types of errors that transformers and its readers raise into one that names the file."""
    try:
        yield
    except Exception as error:
        raise FileError(f"{path}: {problem}: {type(error).__name__}: {str(error)[:_MAX_QUOTED]}") from error


def tiny_config(init: ModelInit, tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeConfig:
    """Return the Qwen3-MoE config of a tiny random model.

    Args:
        init: sizes.
        tokenizer: vocabulary size and special tokens.
    """
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        intermediate_size=init.moe_intermediate_size,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **init.model_dump(),
    )


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a response: the generation config's and the tokenizer's.

    Args:
        model: the model.
        tokenizer: its tokenizer.

    Returns:
        Sorted token ids.
    """
    configured = model.generation_config.eos_token_id if model.generation_config else None
    return _with_end(configured, tokenizer)


def stored_stop_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the same tokens as `stop_token_ids` without loading the model.

    They are the tokenizer's, and generation_config.json's or, where there is no such file, config.json's, as vLLM reads
    them.

    Args:
        path: a checkpoint directory.
        tokenizer: its tokenizer.

    Returns:
        Sorted token ids.

    Raises:
        FileError: the file is not a JSON object.
    """
    file = path / _GENERATION
    configured = read_json(file if file.is_file() else path / CONFIG_FILE, "a model's config").get("eos_token_id")
    return _with_end(configured, tokenizer)


def _with_end(configured: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = {tokenizer.eos_token_id, *([configured] if isinstance(configured, int) else configured or [])}
    return sorted(token for token in ids if token is not None)
