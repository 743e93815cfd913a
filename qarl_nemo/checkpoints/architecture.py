"""A model's parameter names from its Hugging Face config alone; no weight is read or allocated."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def parameter_names(model: str) -> list[str]:
    """Return the names of a model's parameters; a layer's experts are stacked into one.

    Args:
        model: a folder that holds `config.json`, or a name on the Hugging Face hub.

    Returns:
        The names, in the model's order.

    Raises:
        OSError: there is no such config.
        ValueError: the config is not a causal language model's.
    """
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        return [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
