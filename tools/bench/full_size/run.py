"""Time whole GRPO steps of a full-size model on one host, one arm after another, through the launchers that users run.

    python tools/bench/full_size/run.py WORK --nemo-rl ROOT --arm w4a16 --arm bf16 [--set a.b=c]

ROOT holds nemo_rl/, examples/ and megatron/ (Megatron-LM's, and Bridge's inside it) at the supported versions;
PYTHONPATH has what they import. WORK gets the model without weights (`model.py`), the copy of NeMo-RL (`tree.py`) and,
for each arm, a folder with config, output, memory and logs, which `record.py` turns into rows.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml
import yaml
from model import make_model
from tree import copy_tree

REPOSITORY = Path(__file__).parents[3]
HERE = Path(__file__).parent
_CONFIGS = REPOSITORY / "examples" / "configs"
_RECIPE = _CONFIGS / "qarl-qwen3-30ba3b-1n8g-megatron-w4a16.yaml"
_BF16_RECIPE = _CONFIGS / "qarl-qwen3-30ba3b-1n8g-megatron-bf16.yaml"
_VLLM = "policy.generation.vllm_cfg"
# The optimizer stays, and micro-batches fill the GPU: a GPU of 141 GB has room for this.
_RESIDENT = (
    "++policy.offload_optimizer_for_refit=false",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.make_sequence_length_divisible_by=1",
    "policy.sequence_packing.enabled=true",
    "policy.sequence_packing.train_mb_tokens=18432",
    "policy.sequence_packing.logprob_mb_tokens=36864",
    "++policy.sequence_packing.fuse_loss=true",
    "++policy.logprob_chunk_size=1024",
    "++policy.megatron_cfg.defer_fp32_logits=true",
)
_ONE_GPU_ENGINES = (f"{_VLLM}.tensor_parallel_size=1",)
_SMALL = (*_ONE_GPU_ENGINES, f"{_VLLM}.gpu_memory_utilization=0.3")
_LARGE = (*_ONE_GPU_ENGINES, f"{_VLLM}.gpu_memory_utilization=0.55")
_EXPERTS = ("qarl.targets=[experts]",)
# Arm -> (recipe; None is NeMo-RL's own launcher and recipe, overrides)
ARMS: dict[str, tuple[Path | None, tuple[str, ...]]] = {
    "w4a16": (_RECIPE, (*_RESIDENT, *_SMALL)),
    # As on GPUs that the optimizer does not fit beside an engine.
    "w4a16_offloaded": (_RECIPE, (*_RESIDENT, *_SMALL, "++policy.offload_optimizer_for_refit=true")),
    "w4a16_experts": (_RECIPE, (*_RESIDENT, *_SMALL, *_EXPERTS)),
    "w4a8": (_CONFIGS / "qarl-qwen3-30ba3b-1n8g-megatron-w4a8.yaml", (*_RESIDENT, *_SMALL)),
    "fp8_block": (_CONFIGS / "qarl-qwen3-30ba3b-1n8g-megatron-fp8-block.yaml", (*_RESIDENT, *_LARGE)),
    "fp8_channel": (_CONFIGS / "qarl-qwen3-30ba3b-1n8g-megatron-fp8-channel.yaml", (*_RESIDENT, *_LARGE)),
    "int8": (_CONFIGS / "qarl-qwen3-30ba3b-1n8g-megatron-int8.yaml", (*_RESIDENT, *_LARGE)),
    "nvfp4": (_CONFIGS / "qarl-qwen3-30ba3b-1n8g-megatron-nvfp4.yaml", (*_RESIDENT, *_SMALL)),
    "bf16": (_BF16_RECIPE, (*_RESIDENT, *_LARGE)),
    "nemo_rl_best": (None, (*_RESIDENT, *_LARGE)),
    # NeMo-RL's published recipe, adapted to this host: experts over its GPUs, engines that fit its memory.
    "nemo_rl": (None, (f"{_VLLM}.tensor_parallel_size=2", f"{_VLLM}.gpu_memory_utilization=0.6")),
}


def main() -> int:
    """Prepare, and run what the command line names; returns 1 if an arm failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for everything that is made")
    parser.add_argument("--nemo-rl", type=Path, required=True, metavar="ROOT", help="NeMo-RL with megatron/ beside it")
    parser.add_argument("--arm", action="append", choices=sorted(ARMS), help="repeat for several; default w4a16")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="of every arm; repeat")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "examples/models/qwen3-30b-a3b/config.json")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="the first one compiles and warms up")
    parser.add_argument("--profile", type=int, metavar="STEP", help="profile the learner's update in this step")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    tree = copy_tree(arguments.nemo_rl, work / "nemo_rl_root")
    make_model(arguments.config, work, prompt_tokens=240, num_prompts=512)
    (work / "none").mkdir(exist_ok=True)
    (work / "none" / "metadata.json").write_text("{}", encoding="utf-8")
    failed = False
    for arm in arguments.arm or ["w4a16"]:
        code = _run(arm, work, tree, arguments)
        failed |= code != 0
        print(f"{arm}: ended with {code}; {work / arm}/driver.txt", flush=True)
    return int(failed)


def _run(arm: str, work: Path, tree: Path, arguments: argparse.Namespace) -> int:
    folder = work / arm
    folder.mkdir(exist_ok=True)
    recipe, overrides = ARMS[arm]
    own = tree / "examples" / "configs" / "grpo_math_qwen30ba3b_megatron.yaml"
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"defaults": [str(recipe or own), str(HERE / "common.yaml")]}), encoding="utf-8")
    launcher = tree / "examples" / "run_grpo.py" if recipe is None else REPOSITORY / "examples" / "run_qarl_grpo.py"
    assigned = [
        f"cluster.gpus_per_node={arguments.gpus}",
        f"grpo.max_num_steps={arguments.steps}",
        f"policy.model_name={work / 'model'}",
        f"++policy.pretrained_checkpoint={{path: {work / 'none'}, format: megatron_lm}}",
        f"++data.train={_data(work / 'train.jsonl')}",
        f"++data.validation={_data(work / 'val.jsonl')}",
        f"logger.log_dir={folder / 'logs'}",
    ]
    command = [sys.executable, str(launcher), "--config", str(config), *assigned, *overrides, *arguments.set]
    paths = (tree, REPOSITORY, REPOSITORY / "kernels", os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "NEMO_RL_ROOT": str(tree),
        "NRL_MEGATRON_CHECKPOINT_DIR": str(folder / "megatron"),
        "RAY_DEDUP_LOGS": "0",
    }
    if arguments.profile:
        environment["FULL_SIZE_PROFILE"] = f"{arguments.profile}:{folder}"
    with (folder / "driver.txt").open("w") as output, _memory(folder / "memory.csv", arguments.gpus):
        return subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def _data(path: Path) -> str:
    return f"{{dataset_name: ResponseDataset, data_path: {path}, split_validation_size: 0}}"


@contextmanager
def _memory(file: Path, gpus: int) -> Iterator[None]:
    """Record every second how much memory the host and each GPU use, in GiB."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(gpus)]
    ended = threading.Event()

    def watch() -> None:
        with file.open("w") as rows:
            rows.write("time_s,host_gib," + ",".join(f"gpu{index}_gib" for index in range(gpus)) + "\n")
            while not ended.wait(1.0):
                used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30 for handle in handles]
                rows.write(",".join(f"{value:.1f}" for value in (time.time(), _host_gib(), *used)) + "\n")
                rows.flush()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _host_gib() -> float:
    values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(values[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    return (total - free) / 2**20


if __name__ == "__main__":
    sys.exit(main())
