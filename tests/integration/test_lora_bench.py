"""The benchmark of adapters on a packed base, on a model small enough for a CPU."""

import json
import sys

import pytest

from support.whole_models import SPARSE


@pytest.mark.slow
def test_whole_steps_of_a_random_packed_base_are_timed(tmp_path, tools, monkeypatch):
    tools("bench")
    import lora_30b

    class_name = {"architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(SPARSE | class_name))
    sizes = ["--num-prompts", "2", "--num-generations", "2", "--max-new-tokens", "3", "--steps", "1", "--rank", "8"]
    given = ["--config", str(tmp_path), "--device", "cpu", "--targets", "attention,experts", "--work", str(tmp_path)]
    given += ["--base", str(tmp_path / "base")]
    monkeypatch.setattr(sys, "argv", ["lora_30b.py", *given, "--draw"])
    lora_30b.main()
    drawn = (tmp_path / "base" / "config.json").stat().st_mtime_ns
    options = lora_30b.arguments([*given, *sizes])
    rows = {row.name: row for row in lora_30b.rows_of(lora_30b.bench(options), options)}
    assert (tmp_path / "base" / "config.json").stat().st_mtime_ns == drawn
    assert rows["lora_step_s_attention_experts"].value > 0
    assert rows["lora_tokens_s_attention_experts"].op == ">="
    # Two steps of warm-up with changed adapters, so that the gap says that the sampler has them.
    assert rows["lora_gap_nats_attention_experts"].value < 1e-5
