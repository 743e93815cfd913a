"""Train the model of a config's warm start and save it with prompts, as an input for `qarl compare`.

Writes OUTPUT (a Hugging Face directory in the config's precision) and OUTPUT/prompts.jsonl, tasks that the training did
not draw. Random weights would hide the effects of a trained router and of outlier channels.
"""

import argparse
import json
from pathlib import Path

from qarl_nemo.config import load_config
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.model import read_tokenizer
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.setup import resolve_device, starting_model
from qarl_nemo.train.tasks import Task, TaskSource
from qarl_nemo.train.warm_start import greedy_answers


def main() -> None:
    """Train, save, and print how many prompts the model answers correctly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the config, a.b=c")
    parser.add_argument("--config", type=Path, default=Path("examples/configs/local_small_model.yaml"))
    parser.add_argument("--num-prompts", type=int, default=64)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides, LocalConfig)
    source = TaskSource(config.data, config.seed)
    encode = PromptEncoder(read_tokenizer(config.policy), config.policy.tokenizer)
    model, seconds = starting_model(config, source, encode, resolve_device(config.device), None)
    tasks = source.validation(arguments.num_prompts)
    answers = greedy_answers(model, encode, tasks, config.rollout.max_new_tokens)
    right = sum(map(Task.reward, tasks, answers))
    model.save_pretrained(arguments.output)
    encode.tokenizer.save_pretrained(arguments.output)
    lines = [json.dumps({"problem": task.prompt, "answer": task.answer}) for task in tasks]
    (arguments.output / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{arguments.output}: trained in {seconds:.0f} s; {right:.0f} of {len(tasks)} prompts answered right")


if __name__ == "__main__":
    main()
