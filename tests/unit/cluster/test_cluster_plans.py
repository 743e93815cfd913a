"""Launchers' plans: what a dry run prints is what a launch executes."""

import io
import json
import shlex
import subprocess

import pytest
import yaml

from qarl_nemo.cluster.cli import main, plan
from qarl_nemo.cluster.config import ClusterConfig
from qarl_nemo.cluster.plan import Plan, Step, node_line
from qarl_nemo.config import ConfigError, load_config, validate
from support.clusters import EXAMPLES, ROOT, example, one_machine
from support.linters import shellcheck


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_has_a_dry_run_without_its_programs(path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["launch", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    programs = {"hosts": "ssh", "hosts_container": "docker run", "kubernetes": "kubectl", "local": "bash"}
    assert f"{programs.get(path.stem, 'sbatch')} " in printed
    assert "run_qarl_grpo.py" in printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_a_dry_run_prints_is_a_clean_shell_script(path, capsys):
    main(["launch", str(path), "--dry-run"])
    shellcheck(capsys.readouterr().out)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_dry_run_executed_by_a_shell_runs_the_plans_commands_and_input(path, tmp_path, capsys):
    """Programs of the plan are replaced by one that notes its arguments and standard input."""
    planned = plan(example(path.stem))
    notes = tmp_path / "notes"
    for program in {step.command[0] for step in planned.steps}:
        spy = tmp_path / "bin" / program
        spy.parent.mkdir(exist_ok=True)
        spy.write_text(f'#!/bin/bash\n{{ printf "%s\\1" "$0" "$@"; printf "\\2"; cat; printf "\\3"; }} >> {notes}\n')
        spy.chmod(0o755)
    main(["launch", str(path), "--dry-run"])
    script = capsys.readouterr().out
    subprocess.run(["/bin/bash", "-c", f"PATH={tmp_path}/bin:$PATH\n{script}"], stdin=subprocess.DEVNULL, check=True)
    noted = [note.split("\2") for note in notes.read_text().split("\3")[:-1]]
    assert [words.split("\1")[1:-1] for words, _ in noted] == [list(step.command[1:]) for step in planned.steps]
    assert [stdin.rstrip("\n") for _, stdin in noted] == [step.stdin.rstrip("\n") for step in planned.steps]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_a_recipe_for_its_number_of_nodes(path):
    config = example(path.stem)
    words = shlex.split(config.command)
    recipe = ROOT / words[words.index("--config") + 1]
    assert recipe.exists()
    assert f"-{config.nodes}n{config.gpus_per_node}g-" in recipe.name
    assert f"checkpointing.checkpoint_dir={config.checkpoint_dir}" in words


def test_hosts_get_one_node_each_and_the_first_is_the_head():
    steps = plan(example("hosts", "launcher.addresses={gpu-0: 10.0.0.1}")).steps
    assert [step.title for step in steps] == ["head gpu-0", "worker gpu-1"]
    head, worker = (shlex.split(step.command[-1]) for step in steps)
    assert steps[1].command[:-1] == ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "gpu-1")
    assert head[-5:] == ["--lifeline", "--head-address", "10.0.0.1", "--address", "10.0.0.1"]
    assert worker[-3:] == ["--lifeline", "--head-address", "10.0.0.1"]
    assert "node head" in steps[0].command[-1]
    assert "node worker" in steps[1].command[-1]


def test_the_user_of_a_connection_is_no_part_of_the_heads_address():
    steps = plan(example("hosts", "launcher.hosts=[alice@gpu-0, alice@gpu-1]")).steps
    assert [step.command[-2] for step in steps] == ["alice@gpu-0", "alice@gpu-1"]
    for step in steps:
        words = shlex.split(step.command[-1])
        assert words[words.index("--head-address") + 1] == "gpu-0"


def test_a_node_reads_the_config_its_launcher_wrote():
    config = example("hosts")
    (text,) = {step.stdin for step in plan(config).steps}
    assert "\n" not in text
    assert validate(json.loads(text), ClusterConfig, source="stdin") == config


@pytest.mark.parametrize(
    "setup", ["", "true", "true # my venv", "true; true", "module() { :; }\nmodule load cuda\n", "false || true"]
)
def test_a_node_sets_itself_up_in_any_number_of_commands(setup, tmp_path):
    config = example("hosts").model_copy(update={"setup": setup, "python": "echo RAN", "workdir": str(tmp_path)})
    done = subprocess.run(["bash", "-c", node_line(config, ["node"])], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["RAN"]), done.stderr
    broken = config.model_copy(update={"setup": f"{setup}\nfalse"})
    done = subprocess.run(["bash", "-c", node_line(broken, ["node"])], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(
    ("setup", "code", "printed"),
    [
        ("false\necho on", 1, ""),
        ("echo one; (exit 7); echo on", 7, "one\n"),
        ("cd /no/such/folder\ntrue", 1, ""),
        ("false || true\necho on", 0, "on\nRAN"),
        ("set +e; false; echo on", 0, "on\nRAN"),
        ("set -u", 0, "RAN"),
    ],
)
def test_a_setup_ends_at_the_first_failure_that_it_does_not_tolerate(setup, code, printed, tmp_path):
    changes = {"setup": setup, "python": "bash -c 'echo RAN; false; exit 0'", "workdir": str(tmp_path)}
    line = node_line(example("hosts").model_copy(update=changes), ["node"])
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.rstrip()) == (code, printed.rstrip()), done.stderr
    gone = node_line(example("hosts").model_copy(update=changes | {"workdir": "/no/such/folder"}), ["node"])
    done = subprocess.run(["bash", "-c", gone], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_setup_that_reads_leaves_the_node_its_config(tmp_path):
    # As ssh and srun do, whatever they are asked to run.
    changes = {"setup": "export READ=yes; cat >/dev/null", "python": "bash -c 'echo $READ; cat'"}
    config = example("hosts").model_copy(update=changes | {"workdir": str(tmp_path)})
    line, sent = node_line(config, ["node"]), config.as_json()
    done = subprocess.run(["bash", "-c", line], input=sent, capture_output=True, text=True, check=True)
    assert done.stdout == f"yes\n{sent}"


def test_a_pod_reads_the_commands_variables_as_the_launcher_does():
    config = example("kubernetes", "command=python train.py --out \\${HOME}/runs")
    config_map = next(yaml.safe_load_all(plan(config).steps[1].stdin))
    told = validate(json.loads(config_map["data"]["cluster.json"]), ClusterConfig, source="map")
    assert told.command == config.command == "python train.py --out ${HOME}/runs"


def test_containers_share_network_memory_and_mounts():
    line = plan(example("hosts_container")).steps[1].command[-1]
    words = shlex.split(line)
    assert words[:3] == ["exec", "docker", "run"]
    assert {"--gpus=all", "--network=host", "--ipc=host", "--interactive", "--volume=/shared:/shared"} <= set(words)
    assert words[-4:-1] == ["registry.example.com/qarl-nemo:0.1.0", "bash", "-c"]
    assert words[-1].startswith("cd /opt/qarl_nemo && exec python -m qarl_nemo.cluster node worker --lifeline")


def test_gpus_are_asked_for_only_where_some_are_expected():
    # Docker refuses --gpus on a machine without NVIDIA's runtime.
    hosts, slurm, kubernetes = (
        plan(example(name, "gpus_per_node=0")).steps[1] for name in ("hosts_container", "slurm", "kubernetes")
    )
    asked = [*shlex.split(hosts.command[-1]), *slurm.command]
    assert not [word for word in asked if word.startswith(("--gpus", "--gres"))]
    _, job = yaml.safe_load_all(kubernetes.stdin)
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory"}


def test_slurm_submits_a_script_that_starts_one_task_a_node():
    make, submit = plan(example("slurm", "nodes=4", "launcher.sbatch_args=[--qos=high]")).steps
    assert make.command == ("mkdir", "-p", "/shared/logs/qwen3-30ba3b-w4a16")
    assert {"--nodes=4", "--ntasks-per-node=1", "--exclusive", "--gres=gpu:8", "--qos=high"} <= set(submit.command)
    shellcheck(submit.stdin)
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=0" in submit.stdin


def test_the_first_of_thousands_of_nodes_is_the_head(tmp_path, monkeypatch):
    # More names than a pipe holds, so that `scontrol` is still writing when the first one has been read.
    programs = {"scontrol": "seq -f gpu-%05g 1 10000", "srun": 'echo "$@"; cat'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu-[00001-10000]")
    config = example("slurm", "nodes=10000")
    done = subprocess.run(
        ["bash", "-c", plan(config).steps[1].stdin], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *_, words, sent = done.stdout.splitlines()
    assert words.split()[-2:] == ["node", "gpu-00001"]
    assert validate(json.loads(sent), ClusterConfig, source="stdin") == config


def test_slurm_containers_go_through_pyxis():
    config = example("slurm", "container={image: /shared/qarl.sqsh, mounts: [/shared:/shared]}")
    script = plan(config).steps[1].stdin
    assert "--container-image=/shared/qarl.sqsh --container-mounts=/shared:/shared --no-container-mount-home" in script


def test_ray_sub_gets_our_checks_and_watch_as_its_command():
    step = plan(example("slurm_ray_sub")).steps[-1]
    values = dict(word.split("=", 1) for word in step.command[1 : step.command.index("sbatch")])
    assert step.command[-1] == "/shared/nemo-rl/ray.sub"
    assert values["CONTAINER"] == "registry.example.com/qarl-nemo:0.1.0"
    assert values["MOUNTS"] == "/shared:/shared"
    assert values["GPUS_PER_NODE"] == "8"
    assert "-m qarl_nemo.cluster run - <<<" in values["COMMAND"]
    shellcheck(f"#!/bin/bash\n{values['COMMAND']}\n")


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_the_manifests_in_docker_are_the_launchers(kind, capsys):
    main(["manifest", str(ROOT / "docker/clusters/kubernetes.yaml"), f"launcher.kind={kind}"])
    path = ROOT / "docker" / "kubernetes" / f"{kind.lower()}.yaml"
    rendered = capsys.readouterr().out
    assert path.read_text() == rendered, (
        f"python -m qarl_nemo.cluster manifest docker/clusters/kubernetes.yaml launcher.kind={kind} > {path}"
    )


def test_pods_get_the_values_of_variables_as_they_are_written():
    # In a pod's env Kubernetes replaces $(NAME) and takes one of two dollars away.
    written = {"A": "$(HOME)", "B": "a$$b", "C": "$HOME", "D": "plain"}
    config = example("kubernetes").model_copy(update={"env": written})
    _, job = yaml.safe_load_all(plan(config).steps[1].stdin)
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    given = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert {name: given[name].replace("$$", "$") for name in written} == written
    assert not [value for value in given.values() if "$(" in value.replace("$$", "")]


@pytest.mark.parametrize("given", [["log_dir=//shared/logs"], ["launcher.mount_path=//shared/", "log_dir=/shared"]])
def test_two_slashes_begin_a_path_as_one_does(given):
    plan(example("kubernetes", *given))


def test_pods_run_as_a_user_share_the_claim_and_hold_all_gpus():
    text = plan(example("kubernetes", "nodes=3")).steps[1].stdin
    config_map, job = yaml.safe_load_all(text)
    cluster = job["spec"]["rayClusterSpec"]
    assert [group["replicas"] for group in cluster["workerGroupSpecs"]] == [2]
    for template in (cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]):
        pod = template["spec"]
        assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert pod["volumes"][0] == {"name": "shared", "persistentVolumeClaim": {"claimName": "qarl-shared"}}
    assert config_map["data"]["entry.sh"].endswith("run - </etc/qarl/cluster.json")
    shellcheck(f"#!/bin/bash\n{config_map['data']['entry.sh']}\n")
    told = validate(json.loads(config_map["data"]["cluster.json"]), ClusterConfig, source="map")
    assert told.nodes == 3


def test_a_ray_cluster_stays_and_runs_the_job_in_its_head():
    titles = [step.title for step in plan(example("kubernetes", "launcher.kind=RayCluster")).steps]
    assert titles[-1] == "run the job"


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_no_other_shell_resolves_what_setup_says(kind):
    config = example("kubernetes", f"launcher.kind={kind}", "setup='export A=/a; export PATH=$A/bin:$PATH'")
    steps = plan(config).steps
    config_map, job = yaml.safe_load_all(steps[1].stdin)
    assert "export PATH=$A/bin:$PATH" in config_map["data"]["entry.sh"]
    # KubeRay pastes it into a script, whose words Ray quotes anew for a shell of its own.
    entry = job["spec"]["entrypoint"] if kind == "RayJob" else shlex.join(steps[-1].command[-2:])
    assert entry == "bash /etc/qarl/entry.sh"


def test_the_guides_command_for_another_job_is_the_launchers():
    entry = plan(example("kubernetes", "launcher.kind=RayCluster")).steps[-1].command[-2:]
    assert f" -- {shlex.join(entry)}`" in (ROOT / "docs/guide/clusters.md").read_text()


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("hosts", ["nodes=3"], "nodes=3, but launcher.hosts names 2"),
        ("hosts", ["launcher.hosts=[a,a]"], "a is named twice"),
        ("hosts", ["launcher.hosts=['', -oX=y]"], "'' is no host's name"),
        ("hosts", ["launcher.hosts=['', -oX=y]"], "'-oX=y' is no host's name"),
        ("hosts", ["env={A B: 1, C=D: 2, E: 3}"], "no names of variables (letters, digits and _): 'A B', 'C=D'"),
        ("hosts", ["launcher.addresses={c: 10.0.0.1}"], "addresses has c, which is none of the hosts"),
        ("hosts", ["launcher.connect=[ssh]"], "connect must hold {host}"),
        ("hosts", ["launcher.type=slrm"], "did you mean 'slurm'"),
        ("hosts", ["launcher.host=a"], "did you mean 'hosts'"),
        ("hosts", ["checkpoint_dir=results"], "checkpoint_dir"),
        ("hosts", ["log_period_s=0"], "log_period_s"),
        ("hosts", ["env=[A=1]"], "env: expected a block, each line of it NAME: value, not a list"),
        ("hosts", ["python='\"python x'"], "python: it is no program with its arguments: No closing quotation"),
        ("hosts", ["python=' '"], "python: it is empty"),
        ("hosts", ["command=' '"], "command: it is empty"),
        ("slurm", ["launcher.sbatch_args=[--nodes=4]"], "--nodes=4: nodes says how many there are"),
        ("slurm", ["launcher.ray_sub=/x/ray.sub"], "container.image is missing"),
        ("slurm_ray_sub", ["container.args=[--x]"], "passes no container.args"),
        ("kubernetes", ["container=null"], "needs container.image"),
        ("kubernetes", ["container.args=[--x]"], "takes container.args"),
        (
            "kubernetes",
            ["log_dir=/scratch/logs"],
            "log_dir=/scratch/logs does not lie under launcher.mount_path=/shared",
        ),
        (
            "kubernetes",
            ["log_dir=/shared/../scratch"],
            "log_dir=/shared/../scratch does not lie under launcher.mount_path=/shared",
        ),
        ("kubernetes", ["launcher.name=Not_A_Name"], "launcher.name"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_starts(name, overrides, says, capsys):
    assert main(["launch", str(ROOT / f"docker/clusters/{name}.yaml"), *overrides]) == 2
    assert says in capsys.readouterr().err


def test_overrides_of_standard_input_are_refused_and_not_ignored(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(example("hosts").as_json()))
    assert main(["launch", "-", "--dry-run", "nodes=3"]) == 2
    assert "a config on standard input takes no overrides: nodes=3" in capsys.readouterr().err


def test_a_manifest_is_for_kubernetes_alone(capsys):
    assert main(["manifest", str(ROOT / "docker/clusters/slurm.yaml")]) == 2
    assert "launcher.type is 'slurm'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["start"], ["launch"], ["node", "chief", "--head-address", "a"]])
def test_wrong_arguments_end_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_missing_programs_are_named_before_the_first_step():
    absent = Plan((Step("make", ("mkdir", "/nowhere/at/all")), Step("a", ("no-such-a",)), Step("b", ("no-such-b",))))
    with pytest.raises(ConfigError, match="not found on this machine: no-such-a, no-such-b"):
        absent.execute()


def test_a_step_that_a_signal_ended_has_a_shells_exit_code(capfd):
    assert Plan((Step("broken", ("bash", "-c", "kill -9 $$")),)).execute() == 137
    assert "broken failed with exit code 137" in capfd.readouterr().err


def test_steps_stop_at_the_first_that_fails(tmp_path, capfd):
    made = tmp_path / "made"
    steps = (Step("fine", ("true",)), Step("broken", ("bash", "-c", "exit 7")), Step("never", ("mkdir", str(made))))
    assert Plan(steps).execute() == 7
    assert "broken failed with exit code 7" in capfd.readouterr().err
    assert not made.exists()


@pytest.mark.parametrize("written", ["3", "3.10", "0x1F", "1_000", "-.5", "1e-5", "1E22", "'08'", "&a 3.10"])
def test_env_holds_numbers_as_they_are_written(tmp_path, written):
    file, base = tmp_path / "a.yaml", ROOT / "docker" / "clusters" / "slurm.yaml"
    file.write_text(f"\ufeffdefaults: {base}\nsetup: 'é'\nenv:\n  A: {written} # one\n  B: x\n")
    text = written.strip("'").removeprefix("&a ")
    env = load_config(file, [f"env={{C: {written}, D: x}}", f"env.E={text}"], ClusterConfig).env
    assert {name: env[name] for name in "ABCDE"} == dict.fromkeys("ACE", text) | dict.fromkeys("BD", "x")


@pytest.mark.parametrize(
    "block",
    [
        "env: {<<: {A: 3.10, B: 1}, B: 1_0}",
        "env:\n  <<: [{A: 3.10}, &b {B: 1_0}]\n  <<: *b",
        "<<: {env: {<<: {A: 3.10}, B: 1_0}}",
        "launcher: {node_selector: &a {<<: {A: 3.10}}}\nenv: {<<: *a, B: 1_0}",
    ],
)
def test_numbers_that_env_merges_stay_as_they_are_written_too(tmp_path, block):
    file = tmp_path / "a.yaml"
    file.write_text(f"defaults: {ROOT / 'docker' / 'clusters' / 'kubernetes.yaml'}\n{block}\n")
    env = load_config(file, ["env={<<: {C: 3.10}}"], ClusterConfig).env
    assert (env["A"], env["B"], env["C"]) == ("3.10", "1_0", "3.10")


def test_a_block_that_merges_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("env: &e {A: 3.10, <<: *e}\n")
    with pytest.raises(ConfigError, match="recursive aliases"):
        load_config(tmp_path / "a.yaml", [], ClusterConfig)


def test_numbers_that_may_have_been_written_otherwise_are_not_taken_for_text(tmp_path):
    assert one_machine(tmp_path, env={"A": 1, "C": "x"}).env == {"A": "1", "C": "x"}
    for key, changes in (("env.A", {"env": {"A": True}}), ("env.A", {"env": {"A": 3.1}}), ("python", {"python": 3.1})):
        with pytest.raises(ConfigError, match=f"{key}: expected text, not .*; put it in quotes, as you") as refused:
            one_machine(tmp_path, **changes)
        assert "3.1" not in str(refused.value)


def test_a_reference_to_a_number_says_what_to_write_in_its_place(tmp_path):
    file, base = tmp_path / "a.yaml", ROOT / "docker" / "clusters" / "slurm.yaml"
    file.write_text(f"defaults: {base}\nlog_period_s: 10.50\nenv: {{A: '${{log_period_s}}'}}\n")
    with pytest.raises(ConfigError, match=r"env.A: expected text, .*in the place of a \$\{...}, put what it refers to"):
        load_config(file, [], ClusterConfig)
    assert load_config(file, ["env.A='10.50'"], ClusterConfig).env["A"] == "10.50"
