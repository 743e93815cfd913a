"""NeMo-RL asks the recipe's model what the embedded engine asks the arm's, and checks answers as that one does."""

import json

from support.nemo_rl import installed  # noqa: F401

# isort: split
from nemo_rl.data.datasets import AllTaskProcessedDataset
from nemo_rl.data.datasets.response_datasets import load_response_dataset
from test_gsm8k_arm import ARM, CONFIGS, RECIPE

from qarl_nemo import verify
from qarl_nemo.data.problems import read_tasks
from qarl_nemo.data.reward_function import RewardFunction
from qarl_nemo.train.config import TokenizerConfig
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.tokenizer import character_tokenizer

TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"


def test_both_engines_ask_the_same(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "How much is {1}+1?", "answer": "It is\n#### 2"}) + "\n")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    (task,) = read_tasks(ARM.data.train.model_copy(update={"data_path": str(path)}))
    asked = PromptEncoder(tokenizer, TokenizerConfig()).text(task.prompt)
    prompt_file = RECIPE["data"]["default"]["prompt_file"].removeprefix("${oc.env:PWD}/")
    shared = {"prompt_file": str(CONFIGS.parents[1] / prompt_file), "data_path": str(path)}
    shared |= {"system_prompt_file": None, "processor": "math_hf_data_processor", "env_name": "math"}
    for key in ("train", "validation"):
        data = load_response_dataset(RECIPE["data"][key] | shared)
        dataset = AllTaskProcessedDataset(data.dataset, tokenizer, data.task_spec, data.processor, max_seq_length=512)
        assert (
            dataset[0]["message_log"][0]["content"]
            == asked
            == ("<How much is {1}+1?\n\nPlease reason step by step, and put your final answer within \\boxed{}.>=")
        )
        assert dataset[0]["extra_env_info"]["ground_truth"] == task.answer


def test_training_checks_answers_with_the_embedded_engines_verifier():
    judge = RewardFunction(RECIPE["data"]["train"]["reward_function"])
    for response in (r"So \boxed{2}.", r"So \boxed{3}.", "2"):
        assert judge(response, "2", {}) == verify.reward(response, "2")
