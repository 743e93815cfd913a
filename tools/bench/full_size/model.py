"""A model folder made from a Qwen3-MoE `config.json` alone: invented tokenizer, prompts, checkpoint without content.

NeMo-RL, Bridge and vLLM look at a checkpoint's names and shapes before the first step; at full size its 61 GB take
minutes to draw, write and read. The files here are sparse: every header, and no bytes behind it. The learner draws its
own weights, and the engines get theirs by the first refit.
"""

import itertools
import json
import math
import random
import re
import shutil
import struct
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qarl_nemo.architecture import Architecture

_SPECIAL = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> {% endif %}"
)


def make_model(config: Path, folder: Path, *, prompt_tokens: int, num_prompts: int) -> None:
    """Write `folder`/model and `folder`/{train,val}.jsonl.

    Args:
        config: the model's config.json.
        folder: where to write; what is there is replaced.
        prompt_tokens: words of a prompt; its template adds three.
        num_prompts: prompts to train on.
    """
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir(parents=True)
    shutil.copy(config, model / "config.json")
    generation = {"eos_token_id": 151645, "pad_token_id": 151643}
    (model / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    settings = json.loads(config.read_text(encoding="utf-8"))
    _write_headers(model, settings)
    words = _write_tokenizer(model, settings["vocab_size"])
    draw = random.Random(0)
    for name, count in (("train", num_prompts), ("val", 32)):
        rows = ({"input": " ".join(draw.choices(words, k=prompt_tokens)), "output": "42"} for _ in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_tokenizer(model: Path, vocab_size: int) -> list[str]:
    # Words without digits, so that a verifier finds nothing to parse.
    invented = ("q" + "".join(letters) for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4))
    vocabulary = {_SPECIAL.get(index) or next(invented): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(model)
    return [word for word in vocabulary if word.startswith("q")]


def _write_headers(model: Path, config: dict) -> None:
    weight_map, total = {}, 0
    files = defaultdict(list)
    for name, shape in Architecture.parse(config, "the model's config").parameters():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        files[f"layer-{int(layer[1]):03d}" if layer else "ends"].append((name, shape))
    for stem, tensors in files.items():
        header, offset = {}, 0
        for name, shape in tensors:
            size = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
            weight_map[name], offset = f"{stem}.safetensors", offset + size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (model / f"{stem}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            file.truncate(8 + len(raw) + offset)
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
