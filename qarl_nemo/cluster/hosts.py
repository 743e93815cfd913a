"""The plan for plain hosts: one connection to each, whose standard input carries the node's config and its lifeline."""

import shlex

from qarl_nemo.cluster.config import ClusterConfig, ContainerConfig, HostsLauncher
from qarl_nemo.cluster.plan import Plan, Step, node_line


def hosts_plan(config: ClusterConfig, launcher: HostsLauncher) -> Plan:
    """Plan one node on every host.

    Returns:
        Steps that run at the same time, the head's first.
    """
    head = launcher.hosts[0]
    head_address = launcher.addresses.get(head, head.rpartition("@")[2])
    steps = []
    for host in launcher.hosts:
        role = "head" if host == head else "worker"
        arguments = ["node", role, "--lifeline", "--head-address", shlex.quote(head_address)]
        if host in launcher.addresses:
            arguments += ["--address", shlex.quote(launcher.addresses[host])]
        line = node_line(config, arguments)
        if config.container:
            line = _in_docker(config.container, line, gpus=config.gpus_per_node > 0)
        connect = [part.replace("{host}", host) for part in launcher.connect]
        steps.append(Step(f"{role} {host}", (*connect, line), config.as_json(), sent=config.env_from.caller))
    return Plan(tuple(steps), together=True)


def _in_docker(container: ContainerConfig, line: str, *, gpus: bool) -> str:
    """Wrap a shell line into `docker run`: the host's network and shared memory, which NCCL and Ray's store need."""
    options = ["--rm", "--interactive", "--init", *(["--gpus=all"] if gpus else []), "--network=host", "--ipc=host"]
    options += ["--ulimit=memlock=-1", "--ulimit=nofile=65535:65535"]
    options += [f"--volume={mount}" for mount in container.mounts]
    return shlex.join(["exec", "docker", "run", *options, *container.args, container.image, "bash", "-c", line])
