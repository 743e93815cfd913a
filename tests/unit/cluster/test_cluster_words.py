"""What a user writes for a shell, for `sbatch` or for a launcher that never reads it is refused when it is read."""

import pytest

from qarl_nemo.cluster.cli import main, plan
from support.clusters import ROOT, example, one_machine

VALUE = "do-not-print-me"


def _refused(name, override, says, capsys):
    assert main(["launch", str(ROOT / f"docker/clusters/{name}.yaml"), "--dry-run", override]) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert VALUE not in printed


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("python='$VENV/bin/python'", "python: it holds $, which no shell expands here; write the whole path"),
        ("python='~/venv/bin/python'", "python: it holds ~, which no shell expands here"),
        ("python='env A=1 ~/venv/bin/python -X $Y'", "python: it holds $ and ~,"),
        ("""command='python -c "print(1)'""", "command: bash cannot read it: line 1: unexpected EOF while looking for"),
        ("setup='if true; then a'", "setup: bash cannot read it: line 2: syntax error: unexpected end of file"),
        ("setup='(a))'", "setup: bash cannot read it: line 1: syntax error near unexpected token `)'"),
        (f"setup='HF_TOKEN={VALUE} )'", "setup: bash cannot read it: a syntax error; close every quote"),
        (f"setup='x {VALUE} )'", "setup: bash cannot read it: line 1: syntax error near unexpected token `)'"),
        ("setup='# module load cuda'", "setup: it holds no whole command"),
    ],
)
def test_what_no_shell_could_run_is_refused_without_showing_it(override, says, capsys):
    _refused("hosts", override, says, capsys)


@pytest.mark.parametrize("python", ["/a~b/python -u", "nice -n 5 python", "env A=1 '/my venv/bin/python'"])
def test_programs_with_arguments_are_taken(tmp_path, python):
    assert one_machine(tmp_path, python=python).python == python


def test_shell_lines_of_several_commands_are_taken_and_none_is_run(tmp_path):
    line = "module() { :; }\nmodule load cuda # it's mine\nshopt -s extglob\nls !(a)\n"
    line += f"cat <<'E' >{tmp_path}/made\nit's\nE\n"
    config = one_machine(tmp_path, setup=line, command=line)
    assert (config.setup, config.command) == (line, line)
    assert not (tmp_path / "made").exists()


def test_lines_are_not_read_where_there_is_no_bash(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    one_machine(tmp_path, setup="'")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("launcher.sbatch_args=[train.sh]", "entry 1 begins with no -"),
        (f"launcher.sbatch_args=[--qos=high, {VALUE}]", "entry 2 begins with no -"),
        ("launcher.sbatch_args=[--requeue, train.sh, -pgpu, b.sh]", "entry 2, 4 begins with no -"),
        ("launcher.sbatch_args=['--wrap=hostname']", "--wrap would run its command in the place of command"),
        ("launcher.sbatch_args=[--wra, hostname]", "--wra would run its command"),
        ("launcher.sbatch_args=['--array=0-3']", "--array would start many jobs"),
        ("launcher.sbatch_args=[-a, 0-3]", "-a would start many jobs"),
        ("launcher.sbatch_args=[-a0-3]", "-a0-3 would start many jobs"),
        ("launcher.sbatch_args=['--qos=high --mem=0']", "--qos ...: Slurm takes this as one option; make an entry of"),
        (f"launcher.sbatch_args=['--qos {VALUE}']", "--qos ...: Slurm takes this as one option"),
        ("launcher.sbatch_args=['']", "entry 1 begins with no -"),
        ("launcher.time='24 hours'", "launcher.time: '24 hours' is no time limit of Slurm's; write minutes"),
        ("launcher.time='-1'", "launcher.time: '-1' is no time limit"),
        ("launcher.time='1:75:00'", "launcher.time: '1:75:00' is no time limit"),
        ("log_dir=/shared/%u", "log_dir=/shared/%u: Slurm would replace what follows %"),
    ],
)
def test_what_would_make_another_job_of_it_is_refused(override, says, capsys):
    _refused("slurm", override, says, capsys)


@pytest.mark.parametrize("time", ["60", "90:30", "4:00:00", "1-0", "1-12:30", "2-00:00:00", "UNLIMITED"])
def test_every_form_of_slurms_times_is_taken(time):
    assert f"--time={time}" in plan(example("slurm", f"launcher.time='{time}'")).steps[1].command


def test_other_options_of_sbatch_are_taken():
    given = (
        "--qos=high",
        "-p",
        "gpu",
        "-Cx",
        "--constraint",
        "h100",
        "--comment=two words",
        "--account=a",
        "--requeue",
    )
    config = example("slurm", f"launcher.sbatch_args={list(given)}")
    command = plan(config).steps[1].command
    assert command[-len(given) :] == given


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("kubernetes", "ray.port=7000", "launcher.type=kubernetes: KubeRay starts Ray and reads no ray.port;"),
        ("kubernetes", "ray={port: 1, start_args: []}", "reads no ray.port or ray.start_args; leave it out"),
        ("slurm_ray_sub", "ray.start_args=[--x]", "launcher.ray_sub: NeMo-RL's script starts Ray and reads no ray.sta"),
        ("kubernetes", "container.mounts=['/a:/a']", "pods have no container.mounts but launcher.claim at"),
        ("slurm_ray_sub", f"env={{COMMAND: {VALUE}, PATH: x}}", "launcher.ray_sub: env.COMMAND, env.PATH would change"),
        ("slurm_ray_sub", "launcher.sbatch_args=['--export=NONE']", "--export in launcher.sbatch_args hands less"),
    ],
)
def test_what_a_launcher_would_not_read_is_refused(name, override, says, capsys):
    _refused(name, override, says, capsys)


def test_settings_of_rays_start_may_stand_there_at_their_defaults():
    example("kubernetes", "ray.port=6379", "container.mounts=[]")
    example("slurm_ray_sub", "ray.port=6379", "launcher.sbatch_args=['--export=ALL,A=1']")


def test_the_nodes_that_ray_sub_starts_have_the_configs_environment():
    command = plan(example("slurm_ray_sub", "env.NCCL_DEBUG='a b'")).steps[1].command
    assert {"NCCL_DEBUG=a b", "HF_HOME=/shared/huggingface"} <= set(command[: command.index("sbatch")])


@pytest.mark.parametrize("written", ["HOME", "HOME:-/root"])
def test_a_shells_variable_in_braces_says_what_to_write(written, capsys):
    fix = "(setup); ${...} names a key of this config: write ${oc.env:HOME} for this shell's variable, or \\${HOME} to"
    _refused("slurm", f"setup=cd ${{{written}}}", fix, capsys)


def test_a_secrets_value_is_not_asked_for_and_other_keys_are_no_variables(capsys):
    _refused("slurm", "env.A=${WANDB_API_KEY}", "key of this config: write \\${WANDB_API_KEY} to leave it", capsys)
    _refused("slurm", "env.A=${nodse}", "'nodse' not found (env.A)\n", capsys)


def test_what_that_says_is_taken(monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    config = example("slurm", "env.A=${oc.env:HOME}", "setup=cd \\${HOME}")
    assert (config.env["A"], config.setup) == ("/home/a", "cd ${HOME}")
