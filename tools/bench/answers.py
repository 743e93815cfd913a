"""Prompts of GSM8K, and the answers that every model of a comparison reads."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qarl_nemo.data.config import DatasetConfig
from qarl_nemo.data.problems import read_tasks
from qarl_nemo.measure.compare.score import pad_right, read_tokens
from qarl_nemo.train.config import TokenizerConfig
from qarl_nemo.train.model import load_tokenizer, stored_stop_ids
from qarl_nemo.train.prompts import PromptEncoder

TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_BATCH_SIZE = 8


class Answers:
    """The first prompts of a data set, and the answers that an engine samples to them.

    Args:
        model: the model's folder, for its tokenizer.
        data: GSM8K's file.
        num_prompts: how many to take.
    """

    def __init__(self, model: Path, data: Path, num_prompts: int) -> None:
        tokenizer = load_tokenizer(model)
        encoder = PromptEncoder(tokenizer, TokenizerConfig())
        config = DatasetConfig(dataset_name="gsm8k", data_path=str(data), prompt_template=TEMPLATE)
        texts = [encoder.text(task.prompt) for task in read_tasks(config)[:num_prompts]]
        self.prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        self.responses: list[list[int]] = []
        self.stop_ids, self.pad_id = stored_stop_ids(model, tokenizer), tokenizer.pad_token_id

    @torch.inference_mode()
    def sample(self, engine: Any, max_new_tokens: int) -> None:
        """Have an engine answer each prompt once, at temperature 1.

        Args:
            engine: a Hugging Face model.
            max_new_tokens: most tokens of an answer.
        """
        mirrored = pad_right([prompt[::-1] for prompt in self.prompts], self.pad_id)
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        mask = (torch.arange(mirrored.shape[1]) < lengths[:, None]).long()
        generated = engine.generate(
            mirrored.flip(1).to(engine.device),
            attention_mask=mask.flip(1).to(engine.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.stop_ids,
            pad_token_id=self.pad_id,
        )
        self.responses = [_ended(row, self.stop_ids) for row in generated[:, mirrored.shape[1] :].tolist()]

    def read(self, model: PreTrainedModel) -> Tensor:
        """Return a model's logprobs of all tokens of the answers.

        Returns:
            [tokens] FP32, nats.
        """
        sequences = list(zip(self.prompts, self.responses, strict=True))
        logprobs, _ = read_tokens(model, sequences, batch_size=_BATCH_SIZE, pad_id=self.pad_id)
        return logprobs[pad_right([[True] * len(response) for response in self.responses], False)]


def _ended(tokens: list[int], stop_ids: list[int]) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens
