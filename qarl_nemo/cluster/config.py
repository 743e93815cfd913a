"""Settings of a cluster run: nodes, shared paths, the job, how nodes are started. Imports neither torch nor ray."""

import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from qarl_nemo.cluster.sbatch_words import argument_problems, time_problem
from qarl_nemo.cluster.secrets import plain_secrets
from qarl_nemo.cluster.shell_words import line_problem, program_problem, setup_problem
from qarl_nemo.config import StrictModel

AbsolutePath = Annotated[str, Field(pattern=r"^/")]
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What Kubernetes calls a DNS subdomain.
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
# What ray.sub reads, and what would find other programs for `sbatch` itself.
RAY_SUB_READS = ("CONTAINER", "MOUNTS", "GPUS_PER_NODE", "BASE_LOG_DIR", "SETUP_COMMAND", "COMMAND", "PATH")

EXIT_UNHEALTHY = 3
"""The job was not started: nodes are missing or a check failed."""
EXIT_NODE_LOST = 4
"""The job was ended, or ended itself, because nodes were lost."""


class ClusterError(RuntimeError):
    """The cluster cannot run the job; the message lists every problem."""

    exit_code = EXIT_UNHEALTHY


def _one_form(path: str) -> PurePosixPath:
    # Python leaves two slashes at the begin, for systems to which they mean something.
    return PurePosixPath(normpath(f"/{path.lstrip('/')}"))


def _refuse(problem: str | None, given: str) -> str:
    if problem:
        raise ValueError(problem)
    return given


def _names_of_objects(given: tuple[str, ...], fix: str) -> tuple[str, ...]:
    # Told by their places: what is no name may be a secret.
    wrong = [str(place) for place, name in enumerate(given, 1) if not _OBJECT.fullmatch(name) or len(name) > 253]
    if wrong:
        raise ValueError(
            f"entry {', '.join(wrong)}: must be the name of a Secret (lower-case letters, digits, - and .), without "
            f"values; {fix}"
        )
    return given


class HealthConfig(StrictModel):
    """Checks that must pass before the job starts."""

    join_timeout_s: float = Field(600.0, gt=0, le=604_800)
    """How long all nodes with all their GPUs may take to join."""
    check_timeout_s: float = Field(300.0, gt=0, le=86_400)
    """How long a node may take to answer; importing torch from a cold shared file system is slow."""
    worker_envs: tuple[str, ...] = (
        "*MegatronPolicyWorker",
        "*.VllmGenerationWorker",
        "*.VllmAsyncGenerationWorker",
        "*.Qarl*GenerationWorker",
    )
    """Environments under `$NEMO_RL_VENV_DIR` that must import our packages too, as patterns of folder names."""


class RayConfig(StrictModel):
    """How `ray start` is called; Kubernetes leaves that to KubeRay, and `ray_sub` to NeMo-RL's script."""

    port: int = Field(6379, ge=1, le=65535)
    start_args: tuple[str, ...] = ("--min-worker-port=2000", "--max-worker-port=2999")
    """Further arguments on every node. The default keeps workers off the ports that NeMo-RL and the kernel hand out."""


class ContainerConfig(StrictModel):
    """The image every node runs; without one, nodes run what `setup` prepares."""

    image: str = Field(min_length=1)
    mounts: tuple[str, ...] = ()
    """`host:container` folders, above all the shared ones; Kubernetes mounts its claim instead."""
    args: tuple[str, ...] = ()
    """Further arguments of `docker run` or, under Slurm, of `srun`."""


class EnvironmentSources(StrictModel):
    """Sources of variables whose values must not be written down, such as WANDB_API_KEY."""

    secrets: tuple[str, ...] = ()
    """Kubernetes: names of Secrets; each of their keys becomes a variable of every pod."""
    caller: tuple[str, ...] = ()
    """Plain hosts and Slurm: variables of the shell that launches, by name."""

    @field_validator("secrets")
    @classmethod
    def names_of_secrets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Reject anything but a name, such as an assignment, without showing its value."""
        return _names_of_objects(value, "kubectl create secret generic NAME --from-literal=VARIABLE=... makes one")

    @field_validator("caller")
    @classmethod
    def names_of_variables(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Reject anything but a name, such as an assignment, without showing its value."""
        if not all(_VARIABLE.fullmatch(name) for name in value):
            raise ValueError("must be names of variables, without values")
        return value


class HostsLauncher(StrictModel):
    """Plain hosts, reached by ssh; the first is the head."""

    type: Literal["hosts"]
    hosts: tuple[str, ...] = Field(min_length=1)
    """As `connect` takes them, `user@host` too."""
    addresses: dict[str, str] = Field({})
    """A host's address in the cluster's network, where its name does not resolve to it."""
    connect: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "{host}")
    """Command that runs a shell line on `{host}`; the line is appended as one argument."""

    @model_validator(mode="after")
    def names_are_usable(self) -> "HostsLauncher":
        """Reject hosts named twice, addresses of unknown hosts and a connection that goes nowhere."""
        problems = [f"{host} is named twice" for host in set(self.hosts) if self.hosts.count(host) > 1]
        wrong = [host for host in self.hosts if not re.fullmatch(r"[^\s-]\S*", host)]
        problems += [f"{host!r} is no host's name: it is empty, holds a space or starts with -" for host in wrong]
        problems += [f"addresses has {host}, which is none of the hosts" for host in self.addresses.keys() - self.hosts]
        if not any("{host}" in part for part in self.connect):
            problems.append("connect must hold {host}, which stands for the host's name")
        if problems:
            raise ValueError("; ".join(sorted(problems)))
        return self


class SlurmLauncher(StrictModel):
    """One Slurm allocation; containers need the pyxis plug-in."""

    type: Literal["slurm"]
    account: str | None = None
    partition: str | None = None
    time: str = "4:00:00"
    job_name: str = Field("qarl", pattern=r"^[\w.-]+$")
    gres: bool = True
    """Ask for `gpu:<gpus_per_node>`; false on clusters without generic resources."""
    sbatch_args: tuple[str, ...] = ()
    """Further arguments of `sbatch`; how many nodes and tasks there are is the job's own."""
    ray_sub: AbsolutePath | None = None
    """NeMo-RL's own `ray.sub`: then it starts the nodes, and our checks, watch and logs run inside its job."""

    @field_validator("time")
    @classmethod
    def is_a_time(cls, given: str) -> str:
        """Refuse what Slurm would refuse, and -1, which some versions take for no limit."""
        return _refuse(time_problem(given), given)

    @field_validator("sbatch_args")
    @classmethod
    def leaves_the_job(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse what would change how many nodes, tasks or jobs there are, or what they run."""
        if problems := argument_problems(given):
            raise ValueError("; ".join(problems))
        return given


class KubernetesLauncher(StrictModel):
    """KubeRay: a head pod and workers, each with `gpus_per_node` GPUs."""

    type: Literal["kubernetes"]
    kind: Literal["RayJob", "RayCluster"] = "RayJob"
    """RayJob: pods are removed when the job ends. RayCluster: they stay, for one job after another."""
    name: str = Field("qarl", pattern=r"^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$")
    namespace: str = Field("default", pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    claim: str = Field(min_length=1)
    """A ReadWriteMany PersistentVolumeClaim for checkpoints, logs and models."""
    mount_path: AbsolutePath = "/shared"
    ray_version: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    """Version of the image's Ray."""
    cpus: int = Field(32, ge=1, le=4096)
    memory: str = Field("256Gi", pattern=r"^\d+(Mi|Gi|Ti)$")
    shared_memory: str = Field("64Gi", pattern=r"^\d+(Mi|Gi|Ti)$")
    """Size of /dev/shm, which Ray's object store and NCCL use."""
    user_id: int = Field(1000, ge=1, lt=2**31)
    node_selector: dict[str, str] = Field({})
    image_pull_secrets: tuple[str, ...] = ()
    keep_finished_s: int = Field(600, ge=0, le=31_536_000)
    """How long the finished pods stay."""
    start_timeout_s: int = Field(1800, ge=1, le=604_800)
    """How long images may take to arrive before the launcher gives up."""

    @field_validator("image_pull_secrets")
    @classmethod
    def names_of_secrets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Reject anything but a name, without showing it."""
        return _names_of_objects(value, "kubectl create secret docker-registry NAME makes one")


class ClusterConfig(StrictModel):
    """One job on one cluster."""

    nodes: int = Field(ge=1, le=10_000)
    gpus_per_node: int = Field(ge=0, le=64)
    command: str = Field(min_length=1)
    """The job: a shell line that runs on the head in `workdir`."""
    workdir: AbsolutePath
    checkpoint_dir: AbsolutePath
    """Where the job writes checkpoints, on a file system that every node shares."""
    log_dir: AbsolutePath
    """Shared likewise; every run makes a folder in it."""
    setup: str = ""
    """A shell line that every node runs first, such as `source /shared/venv/bin/activate`."""
    python: str = Field("python", min_length=1)
    env: dict[str, str] = Field({})
    """Set on every node, for Ray and the job; written into job files and manifests, so no place for secrets."""
    env_from: EnvironmentSources = EnvironmentSources()
    """Further variables, given by name only: secrets."""
    log_period_s: float = Field(60.0, gt=0, le=86_400)
    """How often nodes copy their Ray logs into `log_dir`; a node that dies loses at most this much of them."""
    container: ContainerConfig | None = None
    health: HealthConfig = HealthConfig()
    ray: RayConfig = RayConfig()
    launcher: HostsLauncher | SlurmLauncher | KubernetesLauncher = Field(discriminator="type")

    def as_json(self) -> str:
        """Serialize what is not at its default as one line of JSON, which a node reads with `validate`."""
        return self.model_dump_json(exclude_defaults=True)

    @field_validator("command")
    @classmethod
    def has_words(cls, command: str) -> str:
        """Refuse a line of nothing but space, and one that bash cannot read."""
        if not command.strip():
            raise ValueError("it is empty; set the shell line that is the job")
        return _refuse(line_problem(command), command)

    @field_validator("setup")
    @classmethod
    def is_whole(cls, setup: str) -> str:
        """Refuse what bash cannot read."""
        return _refuse(setup_problem(setup), setup)

    @field_validator("python")
    @classmethod
    def is_a_program(cls, python: str) -> str:
        """Refuse what a shell could not start, or would have to expand."""
        return _refuse(program_problem(python), python)

    @field_validator("env", mode="before")
    @classmethod
    def environment_is_text(cls, value: object) -> object:
        """Turn whole numbers into text, the only thing an environment holds; others may have been written otherwise."""
        if not isinstance(value, dict):
            return value
        numbers = {key for key, item in value.items() if isinstance(item, int) and not isinstance(item, bool)}
        return {key: str(item) if key in numbers else item for key, item in value.items()}

    @field_validator("env")
    @classmethod
    def env_names_variables(cls, value: dict[str, str]) -> dict[str, str]:
        """Reject names that no variable can have, which a shell, Ray or Kubernetes would refuse or cut."""
        wrong = [name for name in value if not _VARIABLE.fullmatch(name)]
        if wrong:
            raise ValueError(f"no names of variables (letters, digits and _): {', '.join(map(repr, wrong))}")
        return value

    @model_validator(mode="after")
    def launcher_fits(self) -> "ClusterConfig":
        """Reject node counts, images and paths that the launcher cannot serve; all at once."""
        problems, launcher = [], self.launcher
        if isinstance(launcher, HostsLauncher) and len(launcher.hosts) != self.nodes:
            problems.append(f"nodes={self.nodes}, but launcher.hosts names {len(launcher.hosts)}")
        if isinstance(launcher, SlurmLauncher):
            problems += self._slurm_problems(launcher)
        if isinstance(launcher, KubernetesLauncher):
            problems += self._unread_problems("launcher.type=kubernetes", "KubeRay")
            if self.container is None:
                problems.append("launcher.type=kubernetes needs container.image")
            elif self.container.args:
                problems.append("launcher.type=kubernetes: no docker or srun takes container.args; leave them out")
            if self.container and self.container.mounts:
                problems.append(
                    "launcher.type=kubernetes: pods have no container.mounts but launcher.claim at "
                    f"launcher.mount_path={launcher.mount_path}; leave them out"
                )
            paths = {"checkpoint_dir": self.checkpoint_dir, "log_dir": self.log_dir}
            problems += [
                f"{key}={path} does not lie under launcher.mount_path={launcher.mount_path}, so pods do not share it"
                for key, path in paths.items()
                if not _one_form(path).is_relative_to(_one_form(launcher.mount_path))
            ]
        problems += self._secret_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _slurm_problems(self, launcher: SlurmLauncher) -> list[str]:
        problems = []
        if "%" in self.log_dir:
            problems.append(
                f"log_dir={self.log_dir}: Slurm would replace what follows %, and no other does; leave it out"
            )
        if launcher.ray_sub is None:
            return problems
        problems += self._unread_problems("launcher.ray_sub", "NeMo-RL's script")
        if self.container is None:
            problems.append("launcher.ray_sub starts containers: container.image is missing")
        elif self.container.args:
            problems.append("launcher.ray_sub: NeMo-RL's script passes no container.args to srun; leave them out")
        taken = [f"env.{name}" for name in self.env if name in RAY_SUB_READS]
        if taken:
            why = "would change what NeMo-RL's script itself runs; leave it out, or set it in command"
            problems.append(f"launcher.ray_sub: {', '.join(taken)} {why}")
        exports = [each.partition("=")[0] for each in launcher.sbatch_args if re.match(r"--export(?!=ALL\b)", each)]
        if exports:
            why = "hands less to the job than what NeMo-RL's script reads; leave it out, or begin its value with ALL"
            problems.append(f"launcher.ray_sub: {', '.join(exports)} in launcher.sbatch_args {why}")
        return problems

    def _unread_problems(self, launcher: str, starter: str) -> list[str]:
        """Say which settings of Ray's start were given to a launcher that leaves that to another."""
        usual = RayConfig()
        unread = [f"ray.{key}" for key in ("port", "start_args") if getattr(self.ray, key) != getattr(usual, key)]
        return [f"{launcher}: {starter} starts Ray and reads no {' or '.join(unread)}; leave it out"] if unread else []

    def _secret_problems(self) -> list[str]:
        launcher, image = self.launcher, self.container
        texts = {"command": self.command, "setup": self.setup, "python": self.python}
        texts["container.args"] = " ".join(image.args if image else ())
        texts["ray.start_args"] = " ".join(self.ray.start_args)
        if isinstance(launcher, HostsLauncher):
            texts["launcher.connect"] = " ".join(launcher.connect)
        if isinstance(launcher, SlurmLauncher):
            texts["launcher.sbatch_args"] = " ".join(launcher.sbatch_args)
        problems = plain_secrets(self.env, texts)
        on_kubernetes = isinstance(launcher, KubernetesLauncher)
        if on_kubernetes and self.env_from.caller:
            problems.append(
                "env_from.caller: pods do not see this shell's environment; make a Secret (kubectl create secret "
                "generic NAME --from-literal=VARIABLE=...) and name it in env_from.secrets"
            )
        if not on_kubernetes and self.env_from.secrets:
            problems.append("env_from.secrets are Kubernetes's; name variables of this shell in env_from.caller")
        if isinstance(launcher, SlurmLauncher) and self.env_from.caller:
            exports = [each for each in launcher.sbatch_args if each.startswith("--export")]
            problems += [f"launcher.sbatch_args has {each}, without which env_from.caller works" for each in exports]
        return problems
