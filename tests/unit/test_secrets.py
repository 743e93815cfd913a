"""Which variables are secrets, and that NeMo-RL's `env_vars` blocks and overrides of them never show one."""

import pytest

from qarl_nemo.secrets import (
    assigned_secrets,
    is_secret,
    secret_variables,
    without_secrets,
    word_without_secrets,
    words_without_secrets,
)

VALUE = "do-not-print-me"
NAME = "WANDB_API_KEY"
CONFIG = {
    "policy": {
        "megatron_cfg": {"env_vars": {NAME: VALUE, "NCCL_DEBUG": "INFO"}},
        "generation": {"vllm_cfg": {"env_vars": {"HF_TOKEN": VALUE}}, "stop_token_ids": [1]},
        "dtensor_cfg": {"env_vars": None},
    },
    "env": {"math": {"num_workers": 8, "pad_token": "<pad>"}},
}


@pytest.mark.parametrize("name", [NAME, "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "wandb_api_key", "APIKEY"])
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "HF_TOKEN_PATH", "HF_HOME", "MONKEY", "KEYS"])
def test_names_of_other_things(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"export {NAME}={VALUE}", NAME),
        (f"hf_token={VALUE} python run.py", "hf_token"),
        (f"run.py ++policy.megatron_cfg.env_vars.api_token={VALUE}", "api_token"),
        (f"run.py 'policy.megatron_cfg.env_vars={{A: 1, {NAME}: {VALUE}}}'", NAME),
        (f"run.py logger.wandb.api_key={VALUE}", "api_key"),
        (f"run.py +logger.swanlab={{mode: cloud, api_key: {VALUE}}}", "api_key"),
        (f"run.py +env.judge.token={VALUE}", "token"),
        (f"run.py +env.judge.hf_token={VALUE}", "hf_token"),
        (f"run.py +env.database.password={VALUE}", "password"),
        (f"run.py +env.search.SERPER_KEY={VALUE}", "SERPER_KEY"),
        (f"serve --token={VALUE}", "token"),
        (f"serve --api-key={VALUE}", "api-key"),
        (f"serve --a.hf_token={VALUE}", "a.hf_token"),
        (f"serve --wandb-key={VALUE}", "wandb-key"),
        (f"serve --SERPER_KEY={VALUE}", "SERPER_KEY"),
        (f"run.py --policy.env_vars.api_token={VALUE}", "api_token"),
        (f"docker run --env hf_token={VALUE}", "hf_token"),
        (f"docker run --env=hf_token={VALUE}", "hf_token"),
        (f"hf auth login --token {VALUE}", "--token"),
        (f"mysql --password {VALUE}", "--password"),
        (f"ray start --redis-password {VALUE} --head", "--redis-password"),
        (f"serve --api-key '{VALUE}'", "--api-key"),
        (f"serve --port 1 \\\n  --HF_TOKEN \\\n  {VALUE}", "--HF_TOKEN"),
        (f"start_args=['--head', '--redis-password', '{VALUE}']", "--redis-password"),
    ],
)
def test_secrets_in_commands(text, name):
    assert assigned_secrets(text) == [name]


@pytest.mark.parametrize(
    "words",
    [
        "loss_fn.token_level_loss=false",
        "loss_fn.sequence_level_importance_ratios=true loss_fn.use_kl_in_reward.token=$KL",
        "policy.generation.stop_token_ids=[1]",
        "++policy.tokenizer.pad_token='<pad>' policy.generation.pad_token_id=3",
        "data.train.input_key=problem data.train.output_key=answer",
        "'data.train={input_key: problem, output_key: answer, pad_token: 0}'",
        "'data.validation=[{split: test, prompt_key: problem}]'",
        "--eos_token=2 --pad-token=0 --key=2 --a.input_key=problem --tokenizer.pad_token='<pad>'",
        "--password-file /path --tokenizer x --max-tokens 5 --pad-token '<pad>' --input-key problem --no-password x",
        "--password --head --token -x --hf-token | cat; serve --api-key",
        '--redis-password $PASSWORD --token "$(cat token)" --token \\\n  --head',
        "--volume /home/me/token:/token scores-token a the password is",
    ],
)
def test_keys_of_configs_that_are_no_secrets(words):
    assert not assigned_secrets(f"python run.py {words}")


def test_secrets_of_a_config_are_named_and_hidden_and_nothing_else():
    assert secret_variables(CONFIG) == [
        f"policy.megatron_cfg.env_vars.{NAME}",
        "policy.generation.vllm_cfg.env_vars.HF_TOKEN",
    ]
    shown = without_secrets(CONFIG)
    assert VALUE not in str(shown)
    assert shown["policy"]["megatron_cfg"]["env_vars"] == {NAME: "***", "NCCL_DEBUG": "INFO"}
    shown["policy"]["megatron_cfg"]["env_vars"][NAME] = shown["policy"]["generation"]["vllm_cfg"]["env_vars"][
        "HF_TOKEN"
    ] = VALUE
    assert shown == CONFIG


@pytest.mark.parametrize(
    "word",
    [
        f"policy.megatron_cfg.env_vars.{NAME}={VALUE}",
        f"++policy.generation.vllm_cfg.env_vars.HF_TOKEN={VALUE} with, {VALUE}",
        f"policy.megatron_cfg.env_vars={{A: 1, {NAME}: {VALUE}}}",
        f"policy.megatron_cfg.env_vars={{'{NAME}': '{VALUE}'}}",
        f"++policy.megatron_cfg={{enabled: true, env_vars: {{{NAME}: {VALUE}}}}}",
        f"++policy={{megatron_cfg:{{env_vars:{{HF_TOKEN:{VALUE}}}}}}}",
    ],
)
def test_an_override_with_a_secret_shows_its_key_alone(word):
    assert word_without_secrets(word) == word.partition("=")[0] + "=***"


@pytest.mark.parametrize(
    "word",
    [
        "examples/run_qarl_grpo.py",
        "policy.tokenizer.pad_token=<pad>",
        "policy.megatron_cfg.env_vars.NCCL_DEBUG=INFO",
        "policy.megatron_cfg.env_vars={NCCL_DEBUG: INFO}",
        "--password-file /path --tokenizer x",
        "--max-tokens=5",
        "run --redis-password $PASSWORD",
    ],
)
def test_other_words_stay(word):
    assert word_without_secrets(word) == word


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--redis-password", VALUE, "--head"], ["--redis-password", "***", "--head"]),
        (["--a.api-key", f"{VALUE} {VALUE}", "x"], ["--a.api-key", "***", "x"]),
        ([f"--redis-password={VALUE} {VALUE}"], ["--redis-password=***"]),
        ([f"args=--head --redis-password {VALUE} --x"], ["args=--head --redis-password *** --x"]),
        ([f"args=[--token, '{VALUE} {VALUE}', --x]"], ["args=[--token, ***, --x]"]),
        ([f"serve --token={VALUE} --x"], ["serve --token=*** --x"]),
        ([f"ssh -c 'serve --token {VALUE} --x'"], ["ssh -c 'serve --token *** --x'"]),
        (["--token", "--head", "x"], ["--token", "--head", "x"]),
        (["--password-file", "/path", "--tokenizer", "x", "--max-tokens", "5"],) * 2,
    ],
)
def test_an_option_whose_value_is_a_secret_shows_its_name_alone(words, shown):
    assert words_without_secrets(words) == shown
