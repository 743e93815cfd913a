"""Two GPUs: a Megatron learner on Transformer-Engine's layers, vLLM beside it, and a learner on both."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qarl_nemo.train.vllm.host import vllm_problem

MISSING = [name for name in ("megatron", "transformer_engine") if importlib.util.find_spec(name) is None]
PROBLEM = vllm_problem("cuda") or (f"{' and '.join(MISSING)} missing" if MISSING else None)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or ""),
]

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "local_megatron.yaml"
COMMON = ("compare=null", "policy.warm_start.steps=40", "grpo.max_num_steps=4", "grpo.val_period=0")
# Mean |gap|, nats: Megatron's norms and rotation round differently from vLLM's.
BOUND = 0.02


def metrics(run_dir: Path, *overrides: str) -> list[dict]:
    command = [sys.executable, "-m", "qarl_nemo.cli", "train", str(CONFIG), *COMMON, f"run_dir={run_dir}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def gaps(records: list[dict]) -> list[float]:
    return [record["mismatch/abs_gap_mean"] for record in records]


def test_vllm_on_its_own_gpu_follows_an_aligned_learner_and_no_other(tmp_path):
    aligned = metrics(tmp_path / "aligned")
    assert [record["weight_version"] for record in aligned] == [2, 4, 6, 8]
    assert max(gaps(aligned)) < BOUND
    assert max(record["optim/grad_norm"] for record in aligned) < 20
    assert min(gaps(metrics(tmp_path / "apart", "qarl.alignment=rollout_only"))) > BOUND


def test_two_ranks_share_the_experts_and_the_rows(tmp_path):
    packed = ("rollout._override_=true", "rollout.engine=packed", "rollout.max_new_tokens=4")
    ranks = ("policy.megatron_cfg.num_gpus=2", "policy.megatron_cfg.expert_model_parallel_size=2")
    shared = metrics(tmp_path / "shared", *packed, *ranks)
    assert max(gaps(shared)) < BOUND
    resumed = metrics(tmp_path / "shared", *packed, *ranks, "grpo.max_num_steps=5")
    assert resumed[:4] == shared
    assert len(resumed) == 5
