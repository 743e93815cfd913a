"""Where a decoding step's time goes on the GPU: vLLM's kernels by what they do, with dummy weights.

The engine is the one of `qarl doctor --rollout`; its prompts are 1,200 tokens long, the middle of an answer of 2,048.
Steps are timed without the profiler (`wall`) and then counted with it. `linear` holds the dense layers, the router and
the head, whose kernels have the same names.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qarl_nemo.measure.speed.run import engine_request
from qarl_nemo.measure.speed.settings import RolloutSpeedSettings, prepare_speed
from qarl_nemo.measure.speed.vllm_speed import draw_prompts, seconds_to_answer, start_engine
from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures, running_command

# The first that matches.
_GROUPS = {
    "experts": re.compile(r"decode_experts|marlin_moe|fused_moe_kernel|[Gg]rouped|silu|act_and_mul"),
    "routing": re.compile(r"topkGating|moe_align|sort_expert|moe_sum|permute"),
    "attention": re.compile(r"flash(?!_kernel)|Flash"),
    "norms": re.compile(r"rms_norm|rotary|reshape_and_cache"),
    "linear": re.compile(r"decode_linear|marlin::|machete|nvjet|gemm|splitK|quant"),
}
_SETTLE, _STEPS = 16, 256


def profile(options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of a step, and of each kernel in it.

    Args:
        options: the command's.
    """
    settings = RolloutSpeedSettings(
        Path("examples/models/qwen3-30b-a3b"),
        formats=(options.format,),
        targets=tuple(options.targets.split(",")),
        batch_sizes=(options.batch_size,),
        prompt_tokens=1200,
        new_tokens=_STEPS,
    )
    job = prepare_speed(settings)
    fmt = next(one for one in job.formats if one.name == options.format)
    with tempfile.TemporaryDirectory() as folder:
        request = engine_request(job, fmt, [options.batch_size], Path(folder))
        config = Path(folder) / "config.json"
        fewer = json.loads(config.read_text(encoding="utf-8")) | {"num_hidden_layers": options.layers}
        config.write_text(json.dumps(fewer), encoding="utf-8")
        request["options"] |= {"linear_backend": options.linear_backend} if options.linear_backend else {}
        llm, _ = start_engine(request)
        prompts = draw_prompts(llm, request, options.batch_size)
        for _ in range(2):
            # The first turn compiles.
            few, many = (seconds_to_answer(llm, prompts, count) for count in (_SETTLE, _SETTLE + _STEPS))
        counted = [_kernels(llm, prompts, count) for count in (_SETTLE, _SETTLE + _STEPS)]
    return 1e3 * (many - few) / _STEPS, _per_step(*counted)


def _kernels(llm: Any, prompts: list[dict[str, Any]], num_tokens: int) -> dict[str, float]:
    llm.collective_rpc(_watch)
    seconds_to_answer(llm, prompts, num_tokens)
    return llm.collective_rpc(_watched)[0]


def _watch(worker: Any) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    worker.qarl_profile = torch_profile(activities=[ProfilerActivity.CUDA])
    worker.qarl_profile.start()


def _watched(worker: Any) -> dict[str, float]:
    import torch

    torch.cuda.synchronize()
    worker.qarl_profile.stop()
    return {event.key: event.self_device_time_total for event in worker.qarl_profile.key_averages()}


def _per_step(few: Mapping[str, float], many: Mapping[str, float]) -> dict[str, float]:
    return {name: (us - few.get(name, 0.0)) / _STEPS / 1e3 for name, us in many.items()}


def figures(wall: float, kernels: Mapping[str, float], name: str) -> Iterator[Figure]:
    """Sum kernels by what they do."""
    groups = dict.fromkeys([*_GROUPS, "others"], 0.0)
    for kernel, ms in kernels.items():
        group = next((group for group, pattern in _GROUPS.items() if pattern.search(kernel)), "others")
        groups[group] += ms
    yield Figure(f"decode_step_ms_wall_{name}", wall, "ms", "<=")
    for group, ms in groups.items():
        yield Figure(f"decode_step_ms_{group}_{name}", ms, "ms", "<=")


def main() -> None:
    """Profile, print the longest kernels and record groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="w4a16")
    parser.add_argument("--targets", default="experts,attention")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--linear-backend", help="vLLM's kernels of dense layers; its own choice by default")
    parser.add_argument("--label", default="", help="ends the figures' names")
    parser.add_argument("--record", type=Path, help="results file that receives the figures")
    options = parser.parse_args()
    wall, kernels = profile(options)
    for kernel, ms in sorted(kernels.items(), key=lambda pair: -pair[1])[:30]:
        print(f"{1e3 * ms:9.1f} us  {kernel[:140]}")
    command = running_command("python tools/bench/decode_profile.py", "--record")
    found = list(figures(wall, kernels, f"{options.format}{options.label and '_'}{options.label}"))
    record_figures(options.record, found, command=command, **facts("cuda", packages=["vllm"]))


if __name__ == "__main__":
    main()
