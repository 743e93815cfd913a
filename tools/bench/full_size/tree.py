"""A copy of NeMo-RL that starts without a checkpoint; this module lists the lines that differ.

The learner keeps the weights that Megatron draws, with embeddings as large as the environment asks; names of dtypes in
the optimizer's block mean torch's, answers are as long as `answer_lengths.py` says, the asynchronous loop's own actors
run in the system's Python where all others do, the loop's own process has four threads as in our launcher, and one
micro-batch of an update is profiled if the environment asks.
"""

import hashlib
import shutil
from pathlib import Path

from answer_lengths import KEY

HERE = Path(__file__).parent
_LOAD = "    # Load checkpoint if applicable\n    if should_load_checkpoint:\n"
_MOMENTS = "    def __post_init__(self):\n"
_EMBEDDING = "self.embedding_init_method_std = self.init_method_std"
# The variable that says how large embeddings are drawn.
EMBEDDING_STD = "FULL_SIZE_EMBEDDING_STD"
_ENGINES = "nemo_rl/models/generation/vllm/"
_LENGTHS = "__import__('answer_lengths')"
_SHARD = "        # Shard the data across the tied worker groups\n"
_PICK = "        # Pick the data-parallel shard to serve this request."
_PROMPTS = "        # Convert inputs to vLLM format and generate outputs.\n"
_OMEGACONF = "from omegaconf import OmegaConf\n"
_ALLOWED = 'min(self.cfg["max_new_tokens"], remaining_ctx'
# file, the class or function below whose name the first occurrence of a text is replaced, the text, what replaces it
_CHANGES = (
    ("nemo_rl/models/megatron/setup.py", "", _LOAD, "    should_load_checkpoint = False\n" + _LOAD),
    (
        "megatron/core/optimizer/optimizer_config.py",
        "class OptimizerConfig",
        _MOMENTS,
        _MOMENTS + "        for name in ('exp_avg_dtype', 'exp_avg_sq_dtype'):\n"
        "            if isinstance(getattr(self, name), str):\n"
        "                setattr(self, name, getattr(torch, getattr(self, name)))\n",
    ),
    (
        "megatron/core/transformer/transformer_config.py",
        "class TransformerConfig",
        _EMBEDDING,
        "self.embedding_init_method_std = float("
        f"__import__('os').environ.get('{EMBEDDING_STD}', self.init_method_std))",
    ),
    (
        f"{_ENGINES}vllm_generation.py",
        "def generate(",
        _SHARD,
        f"        data = {_LENGTHS}.with_lengths(self, data)\n" + _SHARD,
    ),
    (
        f"{_ENGINES}vllm_generation.py",
        "def _async_generate_base(",
        _PICK,
        f"        data = {_LENGTHS}.with_lengths(self, data)\n" + _PICK,
    ),
    (
        f"{_ENGINES}vllm_worker.py",
        "def generate(",
        _PROMPTS,
        f"        if '{KEY}' in data:\n"
        "            sampling_params = [\n"
        "                self._build_sampling_params(greedy=greedy, stop_strings=stop_strings, max_new_tokens=length)\n"
        f"                for length in data['{KEY}'].tolist()\n"
        "            ]\n" + _PROMPTS,
    ),
    (
        f"{_ENGINES}vllm_worker_async.py",
        "async def generate_async(",
        _ALLOWED,
        f"{_ALLOWED}, *(data['{KEY}'].tolist() if '{KEY}' in data else ())",
    ),
    # As examples/run_qarl_grpo.py.
    ("examples/run_grpo.py", "", _OMEGACONF, f"import torch\n\ntorch.set_num_threads(4)\n{_OMEGACONF}"),
    *(
        (
            "nemo_rl/distributed/ray_actor_environment_registry.py",
            f"async_utils.{actor}",
            "PY_EXECUTABLES.VLLM",
            "VLLM_EXECUTABLE",
        )
        for actor in ("AsyncTrajectoryCollector", "ReplayBuffer")
    ),
)
_PROFILE = """
def _profiled(train, call, folder):
    import functools
    from torch.profiler import ProfilerActivity, profile

    @functools.wraps(train)
    def wrapped(self, *arguments, **named):
        self._num_calls = getattr(self, "_num_calls", 0) + 1
        if self._num_calls != call or self.rank not in (0, 3):
            return train(self, *arguments, **named)
        found, forwards = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]), []

        def begin_or_end(*_):
            forwards.append(None)
            if len(forwards) == 2:
                found.start()
            elif len(forwards) == 3:
                found.stop()

        hook = self.model.register_forward_pre_hook(begin_or_end)
        result = train(self, *arguments, **named)
        hook.remove()
        for key in ("self_cuda_time_total", "self_cpu_time_total"):
            with open(f"{folder}/profile_rank{self.rank}_{key}.txt", "w") as file:
                file.write(found.key_averages().table(sort_by=key, row_limit=70, max_name_column_width=90))
        return result

    return wrapped


if __import__("os").environ.get("FULL_SIZE_PROFILE"):
    _call, _folder = __import__("os").environ["FULL_SIZE_PROFILE"].split(":", 1)
    MegatronPolicyWorkerImpl.train = _profiled(MegatronPolicyWorkerImpl.train, int(_call), _folder)
"""
_WORKER = "nemo_rl/models/policy/workers/megatron_policy_worker.py"
_RAY = "@ray.remote(\n"
_FOLDERS = ("nemo_rl", "examples", "megatron")


def copy_tree(root: Path, copy: Path) -> Path:
    """Copy NeMo-RL and the `megatron` packages beside it, with the changes of this module.

    Args:
        root: folder with nemo_rl/, examples/ and megatron/{core,bridge}/.
        copy: where the copy goes. One of the same files is left as it is, with the bytecode and the index builder that
            a first run compiled, because users do not compile them anew either; any other is replaced.

    Returns:
        `copy`.

    Raises:
        ValueError: a folder is missing, or a line to be changed is not where it is in the supported version.
    """
    needed = (*_FOLDERS[:2], "megatron/core", "megatron/bridge")
    if missing := [folder for folder in needed if not (root / folder).is_dir()]:
        raise ValueError(f"{root} has no {', '.join(missing)}: NeMo-RL's and Megatron's packages belong there")
    digest, written = _digest(root), copy / "digest.txt"
    if written.is_file() and written.read_text(encoding="utf-8") == digest:
        return copy
    shutil.rmtree(copy, ignore_errors=True)
    for folder in _FOLDERS:
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", copy)
    shutil.copy(HERE / "answer_lengths.py", copy)
    for name, inside, old, new in _CHANGES:
        _replace(copy / name, inside, old, new)
    _replace(copy / _WORKER, "", _RAY, _PROFILE.lstrip("\n") + "\n\n" + _RAY)
    written.write_text(digest, encoding="utf-8")
    return copy


def _digest(root: Path) -> str:
    found = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in ("tree.py", "answer_lengths.py")))
    for file in sorted(file for folder in _FOLDERS for file in (root / folder).rglob("*.py")):
        found.update(f"{file.relative_to(root)} {file.stat().st_mtime_ns}".encode())
    return found.hexdigest()


def _replace(path: Path, inside: str, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    begin = text.find(inside)
    before, after = text[:begin], text[begin:]
    if begin < 0 or old not in after:
        raise ValueError(f"{path}: expected {old!r} after {inside!r}: not NeMo-RL 7ea279ab with Megatron-core 0.20")
    path.write_text(before + after.replace(old, new, 1), encoding="utf-8")
