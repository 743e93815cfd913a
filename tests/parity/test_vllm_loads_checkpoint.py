"""Stock vLLM loads what `quantize_checkpoint` writes, with the method the format names, and says what the learner says.

The learner's aligned forward on the BF16 source must agree with vLLM on the quantized checkpoint about the logprobs of
vLLM's own greedy tokens; the unquantized forward on the same tokens is the deliberately wrong input.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qarl_kernels import get_format

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402

from qarl_nemo.checkpoints import quantize_checkpoint  # noqa: E402
from qarl_nemo.layers.install import install  # noqa: E402

# format -> (vLLM's --moe-backend, method vLLM must choose for the experts)
CASES = {
    "w4a16": ("marlin", "CompressedTensorsWNA16MarlinMoEMethod"),
    "w4a8": ("", "CompressedTensorsW4A8Fp8MoEMethod"),
    "fp8_block": ("triton", "Fp8MoEMethod"),
    "fp8_channel": ("", "CompressedTensorsW8A8Fp8MoEMethod"),
    "bf16": ("triton", "UnquantizedFusedMoEMethod"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    model = Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        # Near-equal router probabilities would flip experts between engines; a trained router is not undecided.
        layer.mlp.gate.weight.data *= 8
    folder = tmp_path_factory.mktemp("source")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def vllm_generate(folder: Path, moe_backend: str) -> dict:
    script = Path(__file__).with_name("vllm_generate.py")
    command = [sys.executable, str(script), str(folder), moe_backend, "8", "24"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])


@torch.no_grad()
def learner_gap(source: Path, format_name: str, responses: list[dict]) -> float:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).cuda()
    install(model, ["experts"], get_format(format_name))
    prompt = torch.tensor([response["prompt"] for response in responses]).cuda()
    tokens = torch.tensor([response["tokens"] for response in responses]).cuda()
    logits = model(torch.cat([prompt, tokens], dim=-1)).logits[:, prompt.shape[1] - 1 : -1].float()
    ours = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    theirs = torch.tensor([response["logprobs"] for response in responses]).cuda()
    return float((ours - theirs).abs().mean())


@pytest.mark.parametrize("format_name", CASES)
def test_vllm_serves_the_checkpoint_as_the_learner_computes_it(format_name: str, source: Path, tmp_path: Path) -> None:
    moe_backend, expected = CASES[format_name]
    quantize_checkpoint(source, tmp_path / "quantized", get_format(format_name), ["experts"])
    result = vllm_generate(tmp_path / "quantized", moe_backend)
    method = next(name for module, name in result["methods"].items() if module.startswith("model.layers.0.mlp.experts"))
    aligned = learner_gap(source, format_name, result["responses"])
    unaligned = learner_gap(source, "bf16", result["responses"])
    print(f"\nPARITY {format_name}: method {method}, aligned gap {aligned:.5f}, unaligned gap {unaligned:.5f}")
    assert method.startswith(expected), result["methods"]
    assert not any("Compressed" in name for module, name in result["methods"].items() if module.endswith("mlp.gate"))
    assert aligned < 0.06
    if format_name in ("w4a16", "w4a8"):
        assert unaligned > 2 * aligned
