"""Secrets are named in a cluster's config and never written down: not in plans, manifests, job files or messages."""

import json
import subprocess
import sys

import pytest
import yaml

from qarl_nemo.cluster.cli import main, plan
from qarl_nemo.config import ConfigError
from support.clusters import ROOT, example, one_machine

VALUE = "do-not-print-me"
NAME = "WANDB_API_KEY"


@pytest.mark.parametrize(
    ("base", "override"),
    [
        ("kubernetes", f"env.{NAME}={VALUE}"),
        ("hosts", f"env.{NAME}={VALUE}"),
        ("slurm", f"command='{NAME}={VALUE} python train.py'"),
        ("slurm", f"setup='export {NAME}={VALUE}'"),
        ("kubernetes", f"python='env {NAME}={VALUE} python'"),
        ("hosts", f"launcher.connect=[env, {NAME}={VALUE}, ssh, '{{host}}']"),
        ("kubernetes", f"command='python run.py policy.megatron_cfg.env_vars.{NAME}={VALUE}'"),
        ("kubernetes", f'command="python run.py policy.megatron_cfg.env_vars={{{NAME}: {VALUE}}}"'),
        ("slurm", f"launcher.sbatch_args=['--export=ALL,{NAME}={VALUE}']"),
        ("hosts_container", f"container.args=['--env={NAME}={VALUE}']"),
        ("hosts", f"ray.start_args=['--labels={NAME}={VALUE}']"),
    ],
)
def test_a_secret_in_plain_text_is_refused_without_showing_it(base, override, capsys):
    config = ROOT / "docker" / "clusters" / f"{base}.yaml"
    assert main(["launch", str(config), "--dry-run", override]) == 2
    printed = "".join(capsys.readouterr())
    assert NAME in printed
    assert "env_from" in printed
    assert VALUE not in printed


@pytest.mark.parametrize("args", ["[--redis-password, {}]", "['--redis-password {}']"])
def test_a_secret_that_is_an_options_next_word_is_refused_without_showing_it(args, capsys):
    config = ROOT / "docker" / "clusters" / "hosts.yaml"
    assert main(["launch", str(config), "--dry-run", f"ray.start_args={args.format(VALUE)}"]) == 2
    printed = "".join(capsys.readouterr())
    assert "ray.start_args (--redis-password ...) looks like a secret" in printed
    assert VALUE not in printed


@pytest.mark.parametrize("key", ["env=[{}]", "env_from={}", "env_from.caller={}", "launcher.connect='ssh {}'"])
def test_a_secret_in_the_wrong_place_is_not_shown_either(key, capsys):
    config = ROOT / "docker" / "clusters" / "hosts.yaml"
    assert main(["launch", str(config), "--dry-run", key.format(f"{NAME}={VALUE}")]) == 2
    printed = "".join(capsys.readouterr())
    assert key.partition("=")[0] in printed
    assert VALUE not in printed


def test_a_reference_to_a_variable_is_no_secret_nor_is_a_volume():
    example("slurm", "command='python run.py x.env_vars={HF_TOKEN: $HF_TOKEN}'")
    example("hosts_container", "container.args=['--volume=/home/me/token:/token']")
    example("slurm", f"setup='export {NAME}=$OTHER HF_TOKEN=\"$X\"'")


def test_a_command_may_set_keys_of_the_run_that_name_tokens_and_keys():
    keys = "loss_fn.token_level_loss=false data.train.input_key=problem policy.generation.stop_token_ids=[1]"
    example("slurm", f"command='python run.py {keys}'")
    example("slurm", "command='sort --key=2 x; python run.py --eos_token=2 --pad-token=0'")


def test_pods_take_kubernetes_secrets_by_name():
    config = example("kubernetes", "env_from.secrets=[wandb, hugging-face]")
    job = list(yaml.safe_load_all(plan(config).steps[0].stdin))[1]
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "hugging-face"}}]


@pytest.mark.parametrize(
    ("base", "override", "named"),
    [
        ("kubernetes", f"env_from.caller=[{NAME}]", "kubectl create secret"),
        ("hosts", "env_from.secrets=[wandb]", "env_from.caller"),
        ("slurm", "env_from.secrets=[wandb]", "env_from.caller"),
        ("hosts", f"env_from.caller=['{NAME}={VALUE}']", "names of variables, without values"),
        ("kubernetes", f"env_from.secrets=[wandb, '{NAME}={VALUE}']", "entry 2: must be the name of a Secret"),
        ("kubernetes", f"env_from.secrets=[{VALUE.upper()}]", "kubectl create secret generic NAME"),
        ("kubernetes", f"launcher.image_pull_secrets=['a:{VALUE}']", "kubectl create secret docker-registry NAME"),
    ],
)
def test_each_launcher_has_its_own_way(base, override, named):
    with pytest.raises(ConfigError) as refused:
        example(base, override)
    assert named in str(refused.value)
    assert VALUE not in str(refused.value)


def test_slurm_hands_the_callers_environment_on(monkeypatch):
    monkeypatch.setenv(NAME, VALUE)
    config = example("slurm", f"env_from.caller=[{NAME}]", "container.image=image")
    shown = plan(config).show()
    assert "--export=ALL" in shown
    assert f"--container-env={NAME}" in shown
    assert f"# ... with values of this shell: {NAME}" in shown
    assert VALUE not in shown
    assert "a launch is refused" not in shown
    with pytest.raises(ConfigError, match=r"--export=NONE, without which"):
        example("slurm", f"env_from.caller=[{NAME}]", "launcher.sbatch_args=['--export=NONE']")


def test_a_variable_that_is_not_set_is_named_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv(NAME, raising=False)
    config = one_machine(tmp_path, env_from={"caller": [NAME, "OTHER_TOKEN"]})
    shown = plan(config).show()
    assert f"# ... not set in this shell, so that a launch is refused: {NAME}, OTHER_TOKEN\n" in shown
    with pytest.raises(ConfigError, match=rf"{NAME}, OTHER_TOKEN not set in this shell"):
        plan(config).execute()


def test_hosts_are_sent_values_on_standard_input_alone(monkeypatch, tmp_path):
    """A host that is a shell notes what it reads, its command line and its environment."""
    monkeypatch.setenv(NAME, VALUE)
    note = f"head -n 2 > {tmp_path}/$HOST.stdin; tr '\\0' '\\n' < /proc/$$/cmdline > {tmp_path}/$HOST.words; :"
    connect = ["env", "-u", NAME, "HOST={host}", "bash", "-c", note]
    config = one_machine(tmp_path, connect=connect, env_from={"caller": [NAME]})
    planned = plan(config)
    assert VALUE not in planned.show()
    assert planned.execute() == 3  # neither is a node, so no job has had an outcome
    for host in ("one", "two"):
        first, second = (tmp_path / f"{host}.stdin").read_text().splitlines()
        assert VALUE not in first
        assert json.loads(second) == {NAME: VALUE}
        assert VALUE not in (tmp_path / f"{host}.words").read_text()


def test_a_node_puts_what_it_is_sent_into_its_environment(tmp_path):
    config = one_machine(tmp_path, env_from={"caller": [NAME]})
    program = f"""
import os, sys
from qarl_nemo.cluster import cli, node
node.run_node = lambda config, **_: print(os.environ[{NAME!r}]) or 0
cli._require_ray = lambda: None
sys.exit(cli.main(["node", "worker", "--lifeline", "--head-address", "localhost"]))
"""
    lines = f"{config.as_json()}\n{json.dumps({NAME: VALUE})}\n"
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == VALUE, done.stderr


def test_overrides_may_come_after_options(capsys):
    config = str(ROOT / "docker" / "clusters" / "slurm.yaml")
    assert main(["launch", config, "--dry-run", "nodes=3", "launcher.partition=big"]) == 0
    assert "--nodes=3" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["launch", config, "--dry-rum"])
    assert "unrecognized arguments: --dry-rum" in capsys.readouterr().err


def test_help_names_a_config_that_is_there(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    named = capsys.readouterr().out.split("such as ")[1].split(",")[0]
    assert (ROOT / named).is_file()
