"""Time vLLM's decoding and prefill with dummy weights: `python -P vllm_speed.py REQUEST.json`.

This is a process of its own: an engine keeps global state and frees its memory only when its process ends, and its
environment must be set before it is imported. It imports as little of this project as it can: vLLM's workers do, too.

REQUEST holds `model` (a folder with config.json), `device`, `batch_sizes`, `prompt_tokens`, `settle_tokens`,
`new_tokens`, `repeats`, `seed` and `options` of `vllm.LLM`. Each measurement is printed at once, on a line of its own:
`QARL ` and a JSON object whose `event` is `started` (version, methods, weights_gib, kv_cache_tokens), `batch`
(batch_size, and either `reason` or one value per repeat of decode_tokens_s and prefill_tokens_s) or `finished`
(peak_gib, busiest_expert).
"""

import json
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from qarl_nemo.measure.compare.vllm_responses import import_vllm

# With DeepGEMM, E8M0 would round activation scales to powers of two, for other kernels as well.
_ENVIRONMENT = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1"}
_DEFAULTS = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
_CPU_DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Otherwise the CPU build compiles its sampler at the first request, which takes longer than the measurement.
    "TORCHDYNAMO_DISABLE": "1",
}
# Enough tokens that the busiest expert is due to the router's choice and not to chance.
_ROUTED_TOKENS = 16384
_GIB = 2**30
# Marlin's byte of the NVFP4 scale 1, and the power of two by which it multiplies global scales.
_MARLIN_ONE, _MARLIN_EXPONENT = 0xB0, 119


def main(request_path: str) -> None:
    """Start the engine, time every batch size, print what comes out."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    llm, capacity = start_engine(request)
    block = llm.llm_engine.vllm_config.cache_config.block_size
    for batch_size in request["batch_sizes"]:
        # A sequence takes whole blocks; of a batch that has too few, some would wait, and the speed be another one.
        needed = batch_size * math.ceil(_context(request) / block) * block
        if needed > capacity:
            reason = f"does not fit: the KV cache holds {capacity} tokens, the batch needs {needed}"
            _tell("batch", batch_size=batch_size, reason=reason)
            continue
        _tell("batch", batch_size=batch_size, **_time_batch(llm, draw_prompts(llm, request, batch_size), request))
    peak = max(llm.collective_rpc(_peak_bytes))
    _tell("finished", peak_gib=peak / _GIB if peak else None, busiest_expert=_expert_load(llm, request))


def start_engine(request: dict[str, Any]) -> tuple[Any, int]:
    """Start an engine with dummy weights, as REQUEST says; return it and how many tokens its KV cache holds."""
    on_cpu = request["device"] == "cpu"
    os.environ.update((_DEFAULTS | (_CPU_DEFAULTS if on_cpu else {})) | dict(os.environ) | _ENVIRONMENT)
    vllm = import_vllm(request["device"])
    llm = vllm.LLM(
        request["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=_context(request),
        max_num_seqs=max(request["batch_sizes"]),
        seed=request["seed"],
        **request["options"],
    )
    if not on_cpu:
        llm.collective_rpc(_randomize)
    _require_finite(llm)
    cache = llm.llm_engine.vllm_config.cache_config
    # vLLM keeps one block empty, which holds no tokens.
    capacity = (cache.num_gpu_blocks - 1) * cache.block_size
    _tell(
        "started",
        version=vllm.__version__,
        methods=llm.collective_rpc(_methods)[0],
        weights_gib=max(llm.collective_rpc(_weight_bytes)) / _GIB,
        kv_cache_tokens=capacity,
    )
    return llm, capacity


def _context(request: dict[str, Any]) -> int:
    return request["prompt_tokens"] + request["settle_tokens"] + request["new_tokens"]


def draw_prompts(llm: Any, request: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return `count` prompts of random tokens."""
    draw = random.Random(f"{request['seed']} {count}")
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    lengths = [request["prompt_tokens"]] * count
    return [{"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(length)]} for length in lengths]


def _time_batch(llm: Any, prompts: list[dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    decode, prefill = [], []
    settle, more = request["settle_tokens"], request["new_tokens"]
    for repeat in range(1 + request["repeats"]):
        first = seconds_to_answer(llm, prompts, 1)
        # Both lengths include prefill, filling the batch and emptying it; their difference is full steps only.
        steps = seconds_to_answer(llm, prompts, settle + more) - seconds_to_answer(llm, prompts, settle)
        if repeat == 0:
            # The first repeat compiled and tuned kernels.
            continue
        if steps <= 0:
            return {"reason": "too short to time: more steps took no longer than fewer; raise --new-tokens"}
        prefill.append(len(prompts) * request["prompt_tokens"] / first)
        decode.append(len(prompts) * more / steps)
    return {"decode_tokens_s": decode, "prefill_tokens_s": prefill}


def seconds_to_answer(llm: Any, prompts: list[dict[str, Any]], num_tokens: int) -> float:
    """Return how long the engine takes for answers of `num_tokens` tokens."""
    from vllm import SamplingParams

    # At temperature 1 dummy weights draw tokens evenly; greedily they would repeat one token and so its experts.
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def _randomize(worker: Any) -> None:
    """Fill weights that vLLM leaves uninitialized (integers) or near zero (FP8): a GPU's clocks depend on the bits."""
    import torch

    model = worker.model_runner.get_model()
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            _randomize_one(name, parameter.data)
        for module in model.modules():
            _scale_nvfp4(module)


def _randomize_one(name: str, tensor: Any) -> None:
    import torch

    if name.endswith(("weight", "weight_packed")) and not tensor.is_floating_point():
        bounds = torch.iinfo(tensor.dtype)
        tensor.random_(bounds.min, bounds.max + 1)
    elif name.endswith("weight") and tensor.element_size() == 1:
        for part in tensor.chunk(16):
            part.copy_(torch.empty(part.shape, dtype=torch.bfloat16, device=part.device).uniform_(-1, 1))


def _scale_nvfp4(module: Any) -> None:
    """Give layers of NVFP4 scales as weights have them: Marlin's form of dummy scales is 0 times infinity."""
    import torch

    if not any(name.endswith("weight_global_scale") for name in module._parameters):
        return
    # vLLM keeps the experts' global scales beside the parameters.
    for name, tensor in (vars(module) | module._parameters).items():
        if name.endswith("weight_scale"):
            tensor.data.view(torch.uint8).fill_(_MARLIN_ONE)
        elif name.endswith(("weight_scale_2", "weight_global_scale")):
            tensor.data.fill_(2.0**_MARLIN_EXPONENT / 128)


def _require_finite(llm: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    steps = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], params, use_tqdm=False)[0].outputs[0].logprobs
    if not all(math.isfinite(entry.logprob) for step in steps for entry in step.values()):
        raise RuntimeError("the dummy weights give logprobs that are not finite, so that nothing measured would hold")


def _expert_load(llm: Any, request: dict[str, Any]) -> float | None:
    """Return the busiest expert's number of tokens over the mean, for prompts like the measured ones."""
    llm.collective_rpc(_watch_routers)
    seconds_to_answer(llm, draw_prompts(llm, request, math.ceil(_ROUTED_TOKENS / request["prompt_tokens"])), 1)
    return llm.collective_rpc(_busiest_expert)[0]


def _watch_routers(worker: Any) -> None:
    import torch

    model = worker.model_runner.get_model()

    def count(gate: Any, _: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices.flatten()
        gate.qarl_tokens = gate.qarl_tokens + torch.bincount(chosen, minlength=logits.shape[-1])

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.qarl_tokens = 0
            module.register_forward_hook(count)


def _busiest_expert(worker: Any) -> float | None:
    modules = worker.model_runner.get_model().modules()
    counts = [module.qarl_tokens.float() for module in modules if hasattr(module, "qarl_tokens")]
    return sum(float(one.max() / one.mean()) for one in counts) / len(counts) if counts else None


def _weight_bytes(worker: Any) -> int:
    runner = worker.model_runner
    # On a CPU the runner does not report it.
    own = sum(parameter.numel() * parameter.element_size() for parameter in runner.get_model().parameters())
    return int(getattr(runner, "model_memory_usage", 0) or own)


def _peak_bytes(_: Any) -> int:
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def _methods(worker: Any) -> dict[str, str]:
    from qarl_nemo.refit.engine_methods import method_label

    found = {}
    for name, module in worker.model_runner.get_model().named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            found[name] = method_label(module)
    return found


def _tell(event: str, **values: Any) -> None:
    print("\nQARL " + json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
