"""The plan for Slurm: one `sbatch` of our own script, or of NeMo-RL's `ray.sub` with our checks and watch as job."""

import math
import shlex

from qarl_nemo.cluster.config import ClusterConfig, ContainerConfig, SlurmLauncher
from qarl_nemo.cluster.plan import Plan, Step, node_line

# How long the head may take to end once it knows that a worker is lost: it stops the job and collects logs.
_HEAD_ENDS_WITHIN_S = 300


def slurm_plan(config: ClusterConfig, launcher: SlurmLauncher) -> Plan:
    """Plan the submission of one batch job.

    Returns:
        Two steps: make the folder that Slurm writes to, then `sbatch`.
    """
    options = [f"--nodes={config.nodes}", "--ntasks-per-node=1", "--exclusive", f"--time={launcher.time}"]
    options += [f"--job-name={launcher.job_name}", f"--output={config.log_dir}/slurm-%j.log"]
    options += [f"--account={launcher.account}"] if launcher.account else []
    options += [f"--partition={launcher.partition}"] if launcher.partition else []
    if launcher.gres and config.gpus_per_node:
        options.append(f"--gres=gpu:{config.gpus_per_node}")
    # Slurm passes this shell's environment on, including what `env_from.caller` names.
    options += ["--export=ALL"] if config.env_from.caller else []
    options += launcher.sbatch_args
    if launcher.ray_sub:
        assert config.container is not None  # checked with the config
        env = [f"{key}={value}" for key, value in _ray_sub_environment(config, config.container).items()]
        command = ("env", *env, "sbatch", *options, launcher.ray_sub)
        submit = Step("submit NeMo-RL's ray.sub", command, inherited=config.env_from.caller)
    else:
        submit = Step("submit", ("sbatch", *options), _batch_script(config), inherited=config.env_from.caller)
    # Slurm drops the output of a job whose folder is missing.
    return Plan((Step("make the log folder", ("mkdir", "-p", config.log_dir)), submit))


def _batch_script(config: ClusterConfig) -> str:
    """Write a bash script that needs nothing but Slurm: one task for each node; the first node is the head."""
    line = node_line(config, ["node", "slurm", "--head-address", '"$1"'])
    # The head's watch reports a lost node and keeps the logs, so Slurm must not end the step at once, and not before
    # the head could have said which node never joined or did not answer.
    wait_s = math.ceil(config.health.join_timeout_s + config.health.check_timeout_s) + _HEAD_ENDS_WITHIN_S
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--wait={wait_s}", "--label"]
    srun += _in_pyxis(config.container, config) if config.container else []
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "set -euo pipefail",
            # Without `head -n 1`, which ends after a line: scontrol, still writing thousands of names, would fail.
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "head=${hosts%%$'\\n'*}",
            f"config={shlex.quote(config.as_json())}",
            "# shellcheck disable=SC2016 # each task's own shell expands $1",
            f'{shlex.join([*srun, "bash", "-c", line, "node"])} "$head" <<<"$config"',
            "",
        ]
    )


def _in_pyxis(container: ContainerConfig, config: ClusterConfig) -> list[str]:
    mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
    workdirs = ["--no-container-mount-home", f"--container-workdir={config.workdir}"]
    # Without this an image's own variable of the same name would win.
    caller = [f"--container-env={','.join(config.env_from.caller)}"] if config.env_from.caller else []
    return [f"--container-image={container.image}", *mounts, *workdirs, *caller, *container.args]


def _ray_sub_environment(config: ClusterConfig, container: ContainerConfig) -> dict[str, str]:
    """Return what ray.sub reads, and hands on. Source: ray.sub of NeMo-RL 7ea279ab, "User defined variables"."""
    run = node_line(config, ["run", "-"])
    return {
        # Its nodes' Ray and `setup` have the environment of `sbatch`; the job alone reads the config.
        **config.env,
        "CONTAINER": container.image,
        "MOUNTS": ",".join(container.mounts),
        "GPUS_PER_NODE": str(config.gpus_per_node),
        "BASE_LOG_DIR": config.log_dir,
        "SETUP_COMMAND": config.setup,
        "COMMAND": f"{run} <<<{shlex.quote(config.as_json())}",
    }
