"""Have vLLM answer prompts: `python -P vllm_responses.py REQUEST.json ANSWER.json`.

This is a process of its own because an engine keeps global state and frees its memory only when its process ends, and
because its environment must be set before it is imported.

REQUEST holds `checkpoint`, `device`, `requests` (pairs of temperature and prompts, which are token ids),
`max_new_tokens`, `max_model_len`, `seed`, `stop_token_ids`, `options` of `vllm.LLM`, `adapter`: None, or a PEFT folder
that every request names; and `record`: None, or `{prompts, num_tokens, path}` for a safetensors file of what every
operator put out for some prompts. ANSWER holds `version`,
`methods` (module -> the class that multiplies its weights), and `responses`: for each request a list of the fields of
`compare_score.Response`, in the order of its prompts.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_ENVIRONMENT = {
    # With DeepGEMM, E8M0 would round activation scales to powers of two, for other kernels as well.
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Otherwise the CPU build compiles its sampler at the first request, which takes longer than a comparison.
    "TORCHDYNAMO_DISABLE": "1",
}


def main(request_path: str, answer_path: str) -> None:
    """Answer one request."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    llm, answer = _start(request)
    for temperature, prompts in request["requests"]:
        responses = _respond(llm, request, temperature, prompts)
        answer["responses"].append(_read_again(llm, request, responses))
    if request["record"]:
        _record(llm, **request["record"])
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


def _start(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    llm = start_engine(
        request["checkpoint"],
        request["device"],
        enforce_eager=True,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        max_model_len=request["max_model_len"],
        seed=request["seed"],
        **request["options"],
    )
    return llm, {"version": sys.modules["vllm"].__version__, "methods": llm.apply_model(_methods)[0], "responses": []}


def start_engine(checkpoint: str, device: str, **options: Any) -> Any:
    """Start vLLM in this process, which must not have imported it before.

    Args:
        checkpoint: the model's folder.
        device: `cpu` or `cuda`.
        options: keyword arguments of `vllm.LLM`.

    Returns:
        The engine, which takes and returns token ids.

    Raises:
        RuntimeError: the installed vLLM was built for another device.
    """
    os.environ.update(_ENVIRONMENT | (_CPU_ENVIRONMENT if device == "cpu" else {}))
    vllm = import_vllm(device)
    if device == "cpu":
        options["distributed_executor_backend"] = "uni"
    return vllm.LLM(checkpoint, skip_tokenizer_init=True, **options)


def import_vllm(device: str) -> ModuleType:
    """Import vLLM for `cpu` or `cuda`, once its environment is set.

    Raises:
        RuntimeError: the installed vLLM was built for another device.
    """
    if device == "cpu":
        # PyPI has only CUDA builds of these, which a CPU build of torch cannot load; language models do not need them.
        sys.modules.update(dict.fromkeys(("torchvision", "torchaudio", "torchcodec")))
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        raise RuntimeError(f"vLLM {vllm.__version__} is a {current_platform.device_type} build, not {device}")
    if device == "cpu":
        from vllm.model_executor.models import registry

        # vLLM inspects model classes in a new process, which would load the CUDA builds after all.
        registry._run_in_subprocess = lambda look: look()
    return vllm


def _respond(llm: Any, request: dict[str, Any], temperature: float, prompts: list[list[int]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=request["max_new_tokens"],
        temperature=temperature,
        logprobs=1,
        stop_token_ids=request["stop_token_ids"],
        detokenize=False,
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False, lora_request=saved_adapter(request["adapter"]))
    return [
        {
            "prompt": prompt,
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": _chosen(output.outputs[0].token_ids, output.outputs[0].logprobs),
            "top_tokens": _likeliest(output.outputs[0].logprobs),
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _read_again(llm: Any, request: dict[str, Any], responses: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": response["prompt"] + response["tokens"]} for response in responses]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=saved_adapter(request["adapter"]))
    for response, output in zip(responses, outputs, strict=True):
        entries = output.prompt_logprobs[len(response["prompt"]) :]
        response["read_logprobs"] = _chosen(response["tokens"], entries)
        response["read_top_tokens"] = _likeliest(entries)
    return responses


def saved_adapter(folder: str | None) -> Any:
    """Return the `LoRARequest` of a PEFT folder, which requests are answered with; None without one."""
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("saved", 1, folder)


def _record(llm: Any, prompts: list[list[int]], num_tokens: int, path: str) -> None:
    from safetensors.torch import save_file
    from vllm import SamplingParams

    from qarl_nemo.measure.compare.vllm_operators import OperatorRecorder

    recorder = llm.apply_model(OperatorRecorder)[0]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    recorder.stop()
    save_file(recorder.tensors(), path)


def _chosen(tokens: list[int], entries: list[dict[int, Any]]) -> list[float]:
    return [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]


def _likeliest(entries: list[dict[int, Any]]) -> list[int]:
    return [min(entry, key=lambda token: entry[token].rank) for entry in entries]


def _methods(model: Any) -> dict[str, str]:
    from qarl_nemo.refit.engine_layout import plain_name
    from qarl_nemo.refit.engine_methods import method_label, own_method

    found = {}
    for name, module in model.named_modules():
        if own_method(module) is not None and not hasattr(module, "base_layer"):
            found[plain_name(name)] = method_label(module)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
