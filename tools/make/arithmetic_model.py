"""Make what a NeMo-RL run needs without a network: a small Qwen3-MoE, its tokenizer, and additions to solve.

    python tools/make/arithmetic_model.py FOLDER [--warm-start ACCURACY] [--size tiny|1b|dense] [--largest N]

`dense` is a Qwen2, with biases on q, k and v and an embedding that is also its head.
Writes FOLDER/model (Hugging Face), FOLDER/train.jsonl and FOLDER/val.jsonl ({"input", "output"}, as NeMo-RL's
`ResponseDataset` reads them). With a warm start the model first learns the answers by next-token prediction until that
share of the held-out answers is right; from there on rewards can rise.
"""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Every format can be served in these shapes.
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 512, "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 256},
    "1b": {"hidden_size": 1024, "num_hidden_layers": 16, "num_experts": 32, "moe_intermediate_size": 512},
    "dense": {"hidden_size": 512, "num_hidden_layers": 4},
}
_MOE: dict[str, Any] = {"head_dim": 64, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False}
_CHECK_PERIOD = 10


def main() -> None:
    """Write the folder."""
    arguments = _arguments()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    tasks = {name: [_task(arguments.largest) for _ in range(count)] for name, count in (("train", 8192), ("val", 256))}
    for name, rows in tasks.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config, build = _config(tokenizer, arguments.size)
    config.architectures = [build.__name__]
    # Engines with dummy weights may start while the model is being trained.
    config.save_pretrained(folder / "model")
    _spell_for_all_readers(folder / "model" / "config.json")
    model = build(config).to(arguments.device)
    if arguments.warm_start:
        _warm_start(model, tokenizer, tasks["val"], arguments)
    model.bfloat16().save_pretrained(folder / "weights")
    (folder / "weights" / "generation_config.json").replace(folder / "model" / "generation_config.json")
    (folder / "weights" / "model.safetensors").replace(folder / "model" / "model.safetensors")
    shutil.rmtree(folder / "weights")
    print(f"{folder}: a model, and tasks for training and validation")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=_SIZES, default="tiny")
    parser.add_argument("--largest", type=int, default=99, help="summand")
    parser.add_argument("--warm-start", type=float, default=0.0, metavar="ACCURACY", help="0 leaves random weights")
    parser.add_argument("--max-steps", type=int, default=2000, help="of the warm start")
    parser.add_argument("--batch", type=int, default=256, help="tasks a step of the warm start")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the warm start")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if not 0 <= arguments.warm_start <= 1:
        parser.error(f"--warm-start {arguments.warm_start}: set a share from 0 to 1")
    for name in ("largest", "max_steps", "batch"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: set 1 or more")
    try:
        torch.empty(1, device=arguments.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {arguments.device}: {str(error).splitlines()[0]}")
    return arguments


def _task(largest: int) -> dict[str, str]:
    left, right = random.randint(0, largest), random.randint(0, largest)
    return {"input": f"What is {left} + {right}? Put the answer in \\boxed{{}}.", "output": str(left + right)}


def _tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    # Every digit is a token; longer tokens would have to be learned one by one.
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user assistant What is 1 + 2? Put the answer in \\boxed{}. \\boxed{3}"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _config(tokenizer: PreTrainedTokenizerFast, size: str) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    shape = _SIZES[size]
    common: dict[str, Any] = {
        "vocab_size": 512,
        "intermediate_size": 2 * shape["hidden_size"],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if "num_experts" in shape:
        return Qwen3MoeConfig(**common, **shape, **_MOE), Qwen3MoeForCausalLM
    return Qwen2Config(**common, **shape, tie_word_embeddings=True), Qwen2ForCausalLM


def _warm_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, val: list[dict[str, str]], arguments: Any
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.0)
    held_out = _batch(tokenizer, val, arguments.device)
    for step in range(1, arguments.max_steps + 1):
        rate = arguments.lr * min(1.0, step / 50)
        for group in optimizer.param_groups:
            group["lr"] = rate
        tasks = [_task(arguments.largest) for _ in range(arguments.batch)]
        logits, labels = _answer(model, _batch(tokenizer, tasks, arguments.device))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % _CHECK_PERIOD == 0:
            with torch.no_grad():
                logits, labels = _answer(model, held_out)
            right = ((logits.argmax(-1) == labels) | (labels < 0)).all(-1).float().mean().item()
            print(f"warm start: step {step}, loss {loss.item():.3f}, {right:.1%} right", flush=True)
            if right >= arguments.warm_start:
                return
    raise SystemExit(
        f"after --max-steps {arguments.max_steps} fewer than --warm-start {arguments.warm_start:.0%} of the held-out "
        "answers are right, and no weights were written; take more steps, or ask for less"
    )


def _batch(tokenizer: PreTrainedTokenizerFast, tasks: list[dict[str, str]], device: str) -> tuple[Any, Any]:
    rows, answers = [], []
    for task in tasks:
        message = [{"role": "user", "content": task["input"]}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        start, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (prompt, f"\\boxed{{{task['output']}}}<|im_end|>")
        )
        rows.append(start + answer)
        answers.append(len(answer))
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for index, (row, count) in enumerate(zip(rows, answers, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        labels[index, len(row) - count : len(row)] = torch.tensor(row[-count:])
    return tokens.to(device), labels.to(device)


def _answer(model: PreTrainedModel, batch: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = batch
    # Padding is on the right, where no earlier token attends to it.
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(input_ids=tokens).logits
    return logits[:, :-1].float(), labels[:, 1:]


def _spell_for_all_readers(path: Path) -> None:
    # transformers 5 writes other keys than those that vLLM and older readers look for.
    written = json.loads(path.read_text(encoding="utf-8"))
    num_experts = written.get("num_experts", written.get("num_local_experts"))
    extra: dict[str, Any] = {"dtype": "bfloat16", "rope_theta": 1000000.0}
    extra |= {"num_experts": num_experts} if num_experts else {}
    path.write_text(json.dumps(written | extra, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
