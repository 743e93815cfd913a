"""The plan for Kubernetes: create and follow a KubeRay RayJob or RayCluster that runs our checks, watch and job."""

import shlex
from typing import Any

import yaml

from qarl_nemo.cluster.config import ClusterConfig, ContainerConfig, KubernetesLauncher
from qarl_nemo.cluster.plan import Plan, Step, node_line

CONFIG_FOLDER = "/etc/qarl"
_ENTRY = ("bash", f"{CONFIG_FOLDER}/entry.sh")


def kubernetes_plan(config: ClusterConfig, launcher: KubernetesLauncher) -> Plan:
    """Plan to create the objects, follow the job and end with its outcome.

    Returns:
        Steps of `kubectl`, one after the other.
    """
    text, name, timeout = manifest_text(config, launcher), launcher.name, f"{launcher.start_timeout_s}s"
    steps = [
        ("ask the cluster whether it takes the manifest", ("apply", "--dry-run=server", "-f", "-"), text),
        # `create` refuses a name in use, where `apply` would change a running job.
        ("create the objects", ("create", "-f", "-"), text),
    ]
    if launcher.kind == "RayJob":
        done = "--for=jsonpath={.status.jobStatus}=SUCCEEDED"
        steps += [
            ("wait for its pods", ("wait", "--for=create", f"job/{name}", f"--timeout={timeout}"), ""),
            ("follow the job", ("logs", "--follow", f"job/{name}", f"--pod-running-timeout={timeout}"), ""),
            ("its outcome", ("wait", done, f"rayjob/{name}", "--timeout=60s"), ""),
        ]
    else:
        ready = "--for=jsonpath={.status.state}=ready"
        job = ("exec", f"service/{name}-head-svc", "--container=ray-head", "--", *_ENTRY)
        steps += [
            ("wait for its pods", ("wait", ready, f"raycluster/{name}", f"--timeout={timeout}"), ""),
            ("run the job", job, ""),
        ]
    kubectl = ("kubectl", f"--namespace={launcher.namespace}")
    return Plan(tuple(Step(title, (*kubectl, *command), stdin) for title, command, stdin in steps))


def manifest_text(config: ClusterConfig, launcher: KubernetesLauncher) -> str:
    """Render the manifest."""
    return yaml.safe_dump_all(manifest(config, launcher), sort_keys=False, width=1000)


def manifest(config: ClusterConfig, launcher: KubernetesLauncher) -> list[dict[str, Any]]:
    """Build the config's ConfigMap and the RayJob or RayCluster.

    Source: KubeRay 1.7's custom resources, ray.io/v1.
    """
    assert config.container is not None  # checked with the config
    metadata = {"name": launcher.name, "namespace": launcher.namespace}
    # On standard input, as on other clusters: a file would be read as a user's, whose ${...} is still to be resolved.
    entry = node_line(config, ["run", "-", f"<{CONFIG_FOLDER}/cluster.json"])
    data = {"cluster.json": config.as_json(), "entry.sh": entry}
    cluster = _cluster(config, config.container, launcher)
    job = {
        # KubeRay and Ray hand this from shell to shell, which would resolve what `setup` says with a $.
        "entrypoint": shlex.join(_ENTRY),
        "submissionMode": "K8sJobMode",
        # A driver restarted in place would find half a cluster. A new RayJob resumes from the checkpoint instead.
        "backoffLimit": 0,
        "submitterConfig": {"backoffLimit": 0},
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": launcher.keep_finished_s,
        "rayClusterSpec": cluster,
    }
    spec = job if launcher.kind == "RayJob" else cluster
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data},
        {"apiVersion": "ray.io/v1", "kind": launcher.kind, "metadata": metadata, "spec": spec},
    ]


def _cluster(config: ClusterConfig, image: ContainerConfig, launcher: KubernetesLauncher) -> dict[str, Any]:
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0"},  # where KubeRay submits jobs
        "template": _pod(config, image, launcher, "ray-head"),
    }
    count = config.nodes - 1
    workers = {
        "groupName": "workers",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {},
        "template": _pod(config, image, launcher, "ray-worker"),
    }
    groups = [workers] if count else []
    return {"rayVersion": launcher.ray_version, "headGroupSpec": head, "workerGroupSpecs": groups}


def _pod(config: ClusterConfig, image: ContainerConfig, launcher: KubernetesLauncher, name: str) -> dict[str, Any]:
    limits = {"cpu": str(launcher.cpus), "memory": launcher.memory}
    if config.gpus_per_node:
        limits["nvidia.com/gpu"] = str(config.gpus_per_node)
    env = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0", **config.env}
    secrets = config.env_from.secrets
    container = {
        "name": name,
        "image": image.image,
        "workingDir": config.workdir,
        # Kubernetes reads $$ as $, and would replace a single one's $(NAME).
        "env": [{"name": key, "value": value.replace("$", "$$")} for key, value in env.items()],
        **({"envFrom": [{"secretRef": {"name": name}} for name in secrets]} if secrets else {}),
        "resources": {"requests": limits, "limits": dict(limits)},
        "volumeMounts": [
            {"name": "shared", "mountPath": launcher.mount_path},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: dict[str, Any] = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": launcher.user_id, "fsGroup": launcher.user_id},
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": launcher.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": launcher.shared_memory}},
            {"name": "config", "configMap": {"name": launcher.name}},
        ],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    if launcher.node_selector:
        spec["nodeSelector"] = dict(launcher.node_selector)
    if launcher.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in launcher.image_pull_secrets]
    return {"spec": spec}
