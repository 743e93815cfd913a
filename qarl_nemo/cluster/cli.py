"""`python -m qarl_nemo.cluster`: launch a cluster, check one, run a job on one."""

import argparse
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from qarl_nemo.cluster.config import ClusterConfig, HostsLauncher, KubernetesLauncher
from qarl_nemo.cluster.hosts import hosts_plan
from qarl_nemo.cluster.kubernetes import kubernetes_plan, manifest_text
from qarl_nemo.cluster.plan import Plan
from qarl_nemo.cluster.slurm import slurm_plan
from qarl_nemo.config import ConfigError, load_config, validate
from qarl_nemo.failures import run_reported
from qarl_nemo.installation import pip_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line's words; None takes the process's.

    Returns:
        The exit code; 2 for a config that cannot be used, 3 for a cluster that cannot, others as in `failures`.
    """
    args = _read_arguments(arguments)
    return run_reported(lambda: args.do(args), "ERROR")


def plan(config: ClusterConfig) -> Plan:
    """Return what the config's launcher will do."""
    if isinstance(config.launcher, HostsLauncher):
        return hosts_plan(config, config.launcher)
    if isinstance(config.launcher, KubernetesLauncher):
        return kubernetes_plan(config, config.launcher)
    return slurm_plan(config, config.launcher)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="launch | check | run | manifest")
    launch = commands.add_parser("launch", help="start the nodes, check them, run the job, keep the logs")
    launch.add_argument("--dry-run", action="store_true", help="print what would be done, word for word")
    check = commands.add_parser("check", help="check the Ray cluster this machine belongs to")
    run = commands.add_parser("run", help="on the head of a running Ray cluster: check it, run the job under watch")
    for command in (launch, check, run):
        command.add_argument(
            "config", help="a YAML such as docker/clusters/hosts.yaml, or - for JSON on standard input"
        )
        command.add_argument("overrides", nargs="*", metavar="a.b=c", help="change keys of the config")
    for command in (check, run):
        command.add_argument("--address", help="host:port of Ray's head; default: this machine's cluster")
    # A pipe of the head's node, which has to know whether a Ray that ended took the job with it.
    run.add_argument("--tell-checked", type=int, help=argparse.SUPPRESS)
    manifest = commands.add_parser("manifest", help="print the Kubernetes objects alone, for other ways to apply them")
    manifest.add_argument("config", help="a YAML with launcher.type=kubernetes")
    manifest.add_argument("overrides", nargs="*", metavar="a.b=c")
    node = commands.add_parser("node", help="be one node; launchers call it, the config comes on standard input")
    node.add_argument("role", choices=("head", "worker", "slurm"), help="slurm: the first task is the head")
    node.add_argument("--head-address", required=True)
    node.add_argument("--address", help="of this node in the cluster's network")
    node.add_argument("--lifeline", action="store_true", help="end when standard input closes")
    launch.set_defaults(do=_launch)
    check.set_defaults(do=_check)
    run.set_defaults(do=_run)
    manifest.set_defaults(do=_manifest)
    node.set_defaults(do=_node)
    return parser


def _read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    # argparse takes positional arguments in one run only: overrides that come after an option are left over.
    if rest and (not hasattr(args, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _launch(args: argparse.Namespace) -> int:
    planned = plan(_read(args))
    if args.dry_run:
        print(planned.show(), end="")
        return 0
    return planned.execute()


def _manifest(args: argparse.Namespace) -> int:
    config = _read(args)
    if not isinstance(config.launcher, KubernetesLauncher):
        raise ConfigError(f"launcher.type is {config.launcher.type!r}; only kubernetes has a manifest")
    print(manifest_text(config, config.launcher), end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    _require_ray()
    from qarl_nemo.cluster.job import check_only  # imports Ray, which a dry run does not need

    return check_only(_read(args), args.address)


def _run(args: argparse.Namespace) -> int:
    _require_ray()
    from qarl_nemo.cluster.job import run  # imports Ray, which a dry run does not need

    return run(_read(args), args.address, args.tell_checked)


def _node(args: argparse.Namespace) -> int:
    _require_ray()
    from qarl_nemo.cluster.node import run_node  # needs POSIX, which a dry run does not

    config = _parse(_read_line(), "standard input")
    if args.lifeline and config.env_from.caller:
        # A launcher that connects to hosts sends the values on this line; Slurm puts them into the environment.
        os.environ.update(json.loads(_read_line()))
    head = args.role == "head" or (args.role == "slurm" and os.environ.get("SLURM_PROCID") == "0")
    return run_node(config, head=head, head_address=args.head_address, address=args.address, lifeline=args.lifeline)


def _read_line() -> str:
    """Read byte by byte, without a buffer: what follows the line belongs to the lifeline."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return line.decode()


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{sys.executable} on {socket.gethostname()} has no Ray: {pip_command('nemo')}")


def _read(args: argparse.Namespace) -> ClusterConfig:
    if args.config == "-":
        if args.overrides:
            raise ConfigError(f"a config on standard input takes no overrides: {' '.join(args.overrides)}")
        return _parse(sys.stdin.read(), "standard input")
    return load_config(Path(args.config), args.overrides, ClusterConfig)


def _parse(text: str, source: str) -> ClusterConfig:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} holds no config in JSON: {error}") from error
    return validate(values, ClusterConfig, source=source)
