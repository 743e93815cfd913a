"""What becomes of prompts that NeMo-RL would cut to four tokens and mask; and a prompt as the model sees it."""

from typing import Any

from torch.utils.data import Subset

from qarl_nemo.config import ConfigError

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


def show_prompt(dataset: Any) -> str:
    """Return the first problem of an `AllTaskProcessedDataset` as the model sees it, and what is expected."""
    datum = dataset[0]
    prompt = "".join(str(message["content"]) for message in datum["message_log"])[:_MAX_QUOTED]
    answer = (datum.get("extra_env_info") or {}).get("ground_truth")
    return f"a prompt\n{prompt}\nits answer\n{answer}"
