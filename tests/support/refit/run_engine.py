"""One vLLM engine put through refits: `python -m support.refit.run_engine FOLDER CASE.json FACTS.json`.

A process of its own: an engine keeps global state and gives its memory back only when its process ends. FOLDER holds
BF16 checkpoints called `A` and `B` and the width of their experts; FACTS.json gets what each check found, at once.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from support.refit.cases import EngineCase

_ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


def main(folder: str, case_path: str, facts_path: str) -> None:
    """Start the case's engine and write what its checks find."""
    case = EngineCase(**json.loads(Path(case_path).read_text()))
    facts: dict[str, Any] = {}

    def note(name: str, fact: Any) -> None:
        facts[name] = fact
        Path(facts_path).write_text(json.dumps(facts))

    prepare_environment(case)
    from support.refit import checks

    with tempfile.TemporaryDirectory() as scratch:
        rig = checks.Rig(case, Path(folder), Path(scratch), start)
        note("started", True)
        for name in case.checks:
            try:
                note(name, getattr(checks, name)(rig))
            except Exception:  # noqa: BLE001 the next checks still tell something
                note(name, {"crashed": traceback.format_exc()})
    # An engine's processes may outlive an orderly exit.
    os._exit(0)


def prepare_environment(case: EngineCase) -> None:
    """Set what vLLM reads when it is imported."""
    os.environ.update(_ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not case.in_this_process))
    if case.device == "cpu":
        os.environ.update(_CPU_ENVIRONMENT)
        import qarl_nemo.train  # noqa: F401 hides what CPU vLLM brings broken


def start(case: EngineCase, checkpoint: Path) -> Any:
    """Start the case's engine from a quantized checkpoint."""
    from vllm import LLM

    from qarl_kernels import get_format
    from qarl_nemo.refit.engine_settings import kernel_options

    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**26, "enable_sleep_mode": case.sleeps}
    if case.device == "cpu":
        options |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
        _register_in_this_process("Qwen3MoeForCausalLM")
    else:
        graphs = _GRAPHS | ({"cudagraph_specialize_lora": False} if case.adapters else {})
        options |= {"compilation_config": graphs, "gpu_memory_utilization": 0.02}
        options |= kernel_options(get_format(case.format), ["experts"])
    if case.adapters:
        from qarl_nemo.train.vllm.options import adapter_options
        from support.refit.learner import lora_of

        options |= adapter_options(lora_of(case.targets))
    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        generation_config="vllm",
        # On, so that a refit which forgets to reset it shows.
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        tensor_parallel_size=case.tensor_parallel,
        enable_expert_parallel=case.expert_parallel,
        worker_extension_cls="support.refit.extension.Rank",
        max_model_len=64,
        max_num_seqs=8,
        seed=0,
        **options,
    )


def _register_in_this_process(architecture: str) -> None:
    # Looked up in a second process, where broken packages are not hidden, the model would not be found.
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


if __name__ == "__main__":
    main(*sys.argv[1:])
