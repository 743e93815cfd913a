"""Load a checkpoint in vLLM, generate greedily, and print tokens, logprobs and the method that runs each layer.

A process of its own: an engine keeps global state, and its environment must be set before it is imported.
"""

import json
import os
import sys
from dataclasses import asdict

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_DEEP_GEMM="0",
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    HF_HUB_OFFLINE="1",
)


def main(folder: str, moe_backend: str, num_prompts: int, num_tokens: int, extension: str) -> None:
    from vllm import LLM, SamplingParams

    from qarl_nemo.refit.engine_methods import chosen_methods

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2**28,
        **({"moe_backend": moe_backend} if moe_backend else {}),
        worker_extension_cls=extension,
    )
    token_ids = [[(7 * row + 13 * column) % 500 + 1 for column in range(16)] for row in range(num_prompts)]
    prompts = [{"prompt_token_ids": ids} for ids in token_ids]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False)
    results = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        best = output.outputs[0]
        logprobs = [entry[token].logprob for token, entry in zip(best.token_ids, best.logprobs, strict=True)]
        results.append({"prompt": prompt["prompt_token_ids"], "tokens": list(best.token_ids), "logprobs": logprobs})
    methods = [asdict(record) for record in llm.apply_model(chosen_methods)[0]]
    print("RESULT " + json.dumps({"responses": results, "methods": methods}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
