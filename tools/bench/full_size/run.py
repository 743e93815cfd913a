"""Time whole GRPO steps of a full-size model on one host, one arm after another, through the launchers that users run.

    python tools/bench/full_size/run.py WORK --nemo-rl ROOT --workload a24 --arm w4a16 --arm nemo_rl_best

ROOT holds nemo_rl/, examples/ and megatron/ (Megatron-LM's, and Bridge's inside it) at the supported versions;
PYTHONPATH has what they import. WORK gets a copy of NeMo-RL (`tree.py`) and, for each workload, the model without
weights (`model.py`) and a folder an arm with config, output, memory and logs, which `record.py` turns into rows.
Options change a workload's prompts and answers (`own_workload.py`); `--label` then names it in folders and rows.
`--check` says what would run, or why it could not, and starts nothing: it needs no GPU, and writes to WORK/check.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from answer_lengths import FILE
from arms import ARMS, IN_FLIGHT, REPOSITORY, SHARE, row_name, settings
from composing import compose, host_hint
from host_memory import recorded_memory
from model import make_model
from own_workload import add_options, own_workload, said
from refusals import require_possible
from tree import EMBEDDING_STD, copy_tree
from workloads import TEMPLATE_TOKENS, WORKLOADS

from qarl_nemo.config import merge_mappings
from qarl_nemo.files import read_json
from qarl_nemo.memory import ASLEEP_BYTES, GIB, OVERHEAD_BYTES
from qarl_nemo.nemo_rl.layout_memory import first_gpu_gib
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.refit import engine_decode, engine_decode_linear

_LAUNCHER = REPOSITORY / "examples" / "run_qarl_grpo.py"
_OUTPUT = "driver.txt"
_MODEL = REPOSITORY / "examples" / "models" / "qwen3-30b-a3b" / "config.json"
_STEPS = 4
# What an environment changes in the engines, and rows say with the command.
_SWITCHES = (engine_decode.SWITCH, engine_decode_linear.SWITCH)
# Data of a workload -> its file.
_DATA = {"train": "train.jsonl", "validation": "val.jsonl"}
# As a check of ours reads NeMo-RL's own arms: the same ranks, batches and engines, in BF16.
_AS_OURS = ("++qarl.format=bf16", "++qarl.alignment=none", f"++{IN_FLIGHT}=false")


def main() -> int:
    """Prepare, and run what the command line names; returns 1 if an arm failed."""
    arguments = _parse_arguments()
    # What a check writes is none of what ran.
    folder = arguments.work.absolute() / ("check" if arguments.check else "") / arguments.named
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tree = _prepare(folder, arguments)
    except ValueError as error:
        sys.exit(f"run.py: error: {error}")
    failed = False
    for arm in arguments.arm:
        for placement in arguments.placement:
            code = _run(arm, placement, folder, tree, arguments)
            failed |= code != 0
            name = row_name(arm, placement, arguments.ends)
            place = f"{folder / name / _OUTPUT} says why" if code and not arguments.check else folder / name
            print(f"{name}: ended with {code}; {place}", flush=True)
    return int(failed)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for everything that is made")
    parser.add_argument("--nemo-rl", type=Path, required=True, metavar="ROOT", help="NeMo-RL with megatron/ beside it")
    parser.add_argument("--arm", action="append", choices=sorted(ARMS), help="repeat for several; default w4a16")
    parser.add_argument("--workload", choices=WORKLOADS, default="a", help="GPUs, layers and answers; default a")
    add_options(parser)
    parser.add_argument(
        "--placement",
        action="append",
        metavar="P",
        help="colocated (default), separate_E_L or asynchronous_E_L: E GPUs for engines, L for the learner; repeat",
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="for every arm; repeat")
    parser.add_argument("--label", default="", metavar="WORD", help="ends the names of arms, or of a changed workload")
    parser.add_argument("--config", type=Path, default=_MODEL, help="the model's; the workload says how many layers")
    parser.add_argument(
        "--cap-gib",
        type=float,
        metavar="GIB",
        help="what a run may take of a GPU, of which shares are then; default all",
    )
    parser.add_argument("--steps", type=int, default=_STEPS, help="the first one compiles and warms up")
    parser.add_argument("--profile", type=int, metavar="STEP", help="profile the learner's update in this step")
    parser.add_argument("--check", action="store_true", help="only check configs and memory")
    arguments = parser.parse_args()
    arguments.arm = list(dict.fromkeys(arguments.arm or ["w4a16"]))
    arguments.placement = list(dict.fromkeys(arguments.placement or ["colocated"]))
    try:
        arguments.load = own_workload(arguments)
        # A changed workload has prompts and lengths of its own, so that the label names its folder.
        named, ends = (f"{arguments.workload}_{arguments.label}", "") if said(arguments) else ("", arguments.label)
        arguments.named, arguments.ends = named or arguments.workload, ends
        require_possible(arguments)
        arguments.model = read_json(arguments.config, "a model's config.json")
        if arguments.config != _MODEL and not arguments.label:
            raise ValueError(f"--config {arguments.config}: rows of another model need a --label")
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _prepare(folder: Path, arguments: argparse.Namespace) -> Path:
    """Make what the workload's arms share, and return the folder of NeMo-RL that they run."""
    work = arguments.load
    config = folder / "config.json"
    config.write_text(
        json.dumps(arguments.model | {"num_hidden_layers": work.layers}, indent=1) + "\n", encoding="utf-8"
    )
    if arguments.check:
        # The launcher looks whether they are there, and not for what is in them.
        for name in _DATA.values():
            (folder / name).touch()
        return arguments.nemo_rl.absolute()
    tree = copy_tree(arguments.nemo_rl, arguments.work.absolute() / "nemo_rl_root")
    # Asynchronous engines are steps ahead.
    asked = arguments.steps + 4
    words = work.prompt_tokens - TEMPLATE_TOKENS
    make_model(config, folder, prompt_tokens=words, num_prompts=work.prompts * asked)
    (folder / "lengths.json").write_text(json.dumps(work.lengths(asked)), encoding="utf-8")
    (folder / "none").mkdir(exist_ok=True)
    (folder / "none" / "metadata.json").write_text("{}", encoding="utf-8")
    return tree


def _run(arm: str, placement: str, folder: Path, tree: Path, arguments: argparse.Namespace) -> int:
    own, work = folder / row_name(arm, placement, arguments.ends), arguments.load
    own.mkdir(exist_ok=True)
    model = folder if arguments.check else folder / "model"
    config = merge_mappings(settings(arm, placement, work, tree), files_of(folder, model, own, arguments.steps))
    (own / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    facts = {
        "arm": own.name,
        "workload": arguments.named,
        "work": asdict(work),
        "placement": placement,
        "command": _command_line(arm, placement, arguments),
        # Of a host from one start to the next; `record.py` compares no others.
        "host": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(),
    }
    (own / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    paths = (tree, REPOSITORY, REPOSITORY / "kernels", os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "NEMO_RL_ROOT": str(tree)}
    ours = ARMS[arm].recipe is not None
    overrides = list(arguments.set)
    if arguments.cap_gib is not None:
        overrides += capped(arguments.cap_gib, compose(config, tree, overrides), ours=ours or arguments.check)
    if hint := host_hint(config, tree, overrides, ours=ours):
        print(f"{own.name}: hint: {hint}", flush=True)
    if arguments.check:
        command = _command(_LAUNCHER, own, [*overrides, *(() if ours else _AS_OURS), "--check"])
        return subprocess.run(command, env=environment, check=False).returncode
    launcher = _LAUNCHER if ours else tree / "examples" / "run_grpo.py"
    environment |= {
        "NRL_MEGATRON_CHECKPOINT_DIR": str(own / "megatron"),
        "RAY_DEDUP_LOGS": "0",
        **({FILE: str(folder / "lengths.json")} if work.unequal else {}),
        # Layers add little to embeddings as large, so that tokens stay as different as they are drawn.
        **({EMBEDDING_STD: "1"} if work.even_routers else {}),
        **({"FULL_SIZE_PROFILE": f"{arguments.profile}:{own}"} if arguments.profile else {}),
    }
    command = _command(launcher, own, overrides)
    with (own / _OUTPUT).open("w") as output, recorded_memory(own / "memory.csv", work.gpus):
        return subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def _command(launcher: Path, own: Path, overrides: list[str]) -> list[str]:
    return [sys.executable, str(launcher), "--config", str(own / "config.yaml"), *overrides]


def files_of(folder: Path, model: Path, own: Path, steps: int) -> dict[str, Any]:
    """Return the settings that name files, and the run's length.

    Args:
        folder: the workload's.
        model: the model's.
        own: the arm's.
        steps: how many to run.
    """
    read = {
        name: {"dataset_name": "ResponseDataset", "data_path": str(folder / file), "split_validation_size": 0}
        for name, file in _DATA.items()
    }
    return {
        "grpo": {"max_num_steps": steps},
        "policy": {
            "model_name": str(model),
            "pretrained_checkpoint": {"path": str(folder / "none"), "format": "megatron_lm"},
        },
        "data": read,
        "logger": {"log_dir": str(own / "logs")},
    }


def capped(cap: float, config: dict[str, Any], *, ours: bool) -> list[str]:
    """Return the overrides that keep learner and engine within a part of each GPU.

    Args:
        cap: GiB of it. Where this machine has no GPU, those that are checked have as much.
        config: the whole config with what `--set` says, whose share of a GPU becomes one of the part.
        ours: whether our launcher reads the config.
    """
    card = first_gpu_gib()
    if card is None:
        return [f"++qarl.gpu_memory_gib={cap}"]
    learner = cap - (OVERHEAD_BYTES + ASLEEP_BYTES) / GIB
    allocator = f"expandable_segments:False,per_process_memory_fraction:{learner / card:.3f}"
    return [
        f"{SHARE}={look_up(config, SHARE) * cap / card:.3f}",
        f"++policy.megatron_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF='{allocator}'",
        # By itself our check would decide for the whole GPU.
        *(["++qarl.resident=false"] if ours and look_up(config, "qarl.resident", None) is None else []),
    ]


def _command_line(arm: str, placement: str, arguments: argparse.Namespace) -> str:
    words = ["--workload", arguments.workload, "--arm", arm]
    words += ["--placement", placement] if placement != "colocated" else []
    words += said(arguments)
    words += ["--label", arguments.label] if arguments.label else []
    words += ["--cap-gib", f"{arguments.cap_gib:g}"] if arguments.cap_gib else []
    words += ["--config", str(arguments.config)] if arguments.config != _MODEL else []
    words += ["--steps", str(arguments.steps)] if arguments.steps != _STEPS else []
    words += ["--profile", str(arguments.profile)] if arguments.profile else []
    words += [word for override in arguments.set for word in ("--set", override)]
    switches = [f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ]
    return " ".join([*switches, "python tools/bench/full_size/run.py WORK --nemo-rl ROOT", shlex.join(words)])


if __name__ == "__main__":
    # A launcher would outlive a program that a signal ends at once, and keep its GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
