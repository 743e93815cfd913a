"""What becomes of prompts that NeMo-RL would cut and mask, or not ask or train; and one as the model sees it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Subset

from qarl_nemo.config import ConfigError
from qarl_nemo.nemo_rl.checks.validation import read_validation

_MAX_QUOTED = 4000


def limit_prompts(dataset: Any, key: str, *, skip: bool) -> str:
    """Refuse or leave out the prompts that are too long.

    Args:
        dataset: NeMo-RL's `AllTaskProcessedDataset`; shortened in place.
        key: its key in the `data:` block.
        skip: leave them out.

    Returns:
        How many there are, and how many were left out, in words.

    Raises:
        ConfigError: there are such prompts and `skip` is false, or no others.
    """
    kept, longest = [], 0
    for place in range(len(dataset)):
        datum = dataset[place]
        # NeMo-RL's processors give a prompt that they cut the weight 0, and say its length before that.
        if datum["loss_multiplier"]:
            kept.append(place)
        else:
            longest = max(longest, int(datum["length"]))
    total, limit = len(dataset), dataset.max_seq_length
    if len(kept) == total:
        return f"{key}: {total:,} problems"
    if not (skip and kept):
        others = ", or data.overlong_prompts to skip (left out) or mask (NeMo-RL's cut and mask)" if kept else ""
        raise ConfigError(
            f"{total - len(kept)} of the {total} prompts of data.{key} have {limit} tokens or more, the longest "
            f"{longest}; set data.max_input_seq_length higher{others}"
        )
    dataset.dataset = Subset(dataset.dataset, kept)
    return (
        f"{key}: {len(kept):,} problems, {total - len(kept):,} with {limit} tokens or more (at most {longest}) skipped"
    )


def require_steps(dataset: Any, data: Mapping[str, Any], grpo: Mapping[str, Any]) -> None:
    """Refuse a training set of fewer prompts than a step takes, with which NeMo-RL would end without any step.

    Args:
        dataset: NeMo-RL's `AllTaskProcessedDataset`.
        data: the `data:` block.
        grpo: the `grpo:` block.

    Raises:
        ConfigError: it has fewer.

    Source: NeMo-RL 7ea279ab, `init_train_dataloader` in `algorithms/grpo.py`, which drops a batch that is not whole.
    """
    several = data.get("use_multiple_dataloader", False)
    key = "data.num_prompts_per_dataloader" if several else "grpo.num_prompts_per_step"
    wanted = (data.get("num_prompts_per_dataloader") if several else grpo.get("num_prompts_per_step")) or 0
    if grpo.get("use_dynamic_sampling", False):
        wanted = int(wanted * grpo.get("batch_multiplier", 1))
    if len(dataset) < wanted:
        raise ConfigError(
            f"data.train has {len(dataset):,} prompts, and {key} takes {wanted:,} at once, whole batches only, so that "
            f"NeMo-RL would start every worker and end without a step; set {key} to at most {len(dataset)}, or take "
            "more problems"
        )


def unasked_prompts(dataset: Any, config: Mapping[str, Any]) -> str:
    """Say which prompts of a validation set NeMo-RL does not ask: it takes the first, in whole batches, in order.

    Args:
        dataset: NeMo-RL's `AllTaskProcessedDataset`.
        config: NeMo-RL's config, as nested dictionaries; the blocks `grpo` and `env` are read.

    Returns:
        How many are asked, which data sets have no part in them, and what to set; empty if all are asked, or nothing is
        validated by these keys.
    """
    validation = read_validation(config)
    if validation is None or validation.asked >= len(dataset):
        return ""
    names = [dataset.dataset[place]["task_name"] for place in range(len(dataset))]
    missing = [name for name in Counter(names) if name not in names[: validation.asked]]
    none_of = f", none of {' and '.join(missing)}" if missing else ""
    return (
        f"validation asks {validation.asked:,} of {len(names):,} problems{none_of}; for all set "
        f"grpo.max_val_samples={validation.needed(len(names))}"
    )


def show_prompt(dataset: Any) -> str:
    """Return the first problem of an `AllTaskProcessedDataset` as the model sees it, and what is expected."""
    datum = dataset[0]
    prompt = "".join(str(message["content"]) for message in datum["message_log"])[:_MAX_QUOTED]
    answer = (datum.get("extra_env_info") or {}).get("ground_truth")
    return f"a prompt\n{prompt}\nits answer\n{answer}"
