"""The README's commands that a CPU can run, run: the demo, shortened, and the quantization of what it leaves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = [
    "policy.warm_start.steps=1",
    "grpo.max_num_steps=1",
    "grpo.num_prompts_per_step=2",
    "grpo.train_global_batch_size=8",
]


def qarl(*arguments: str) -> str:
    command = [sys.executable, "-m", "qarl_nemo", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_trains_and_what_it_leaves_is_quantized_for_serving(tmp_path):
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    assert "\nmake demo " in readme
    demo = re.search(r"^demo-packed:.*\n\t\$\(BIN\)/qarl (.+)$", makefile, re.MULTILINE)[1]
    assert "report.html" in qarl(*demo.split(), f"run_dir={tmp_path / 'run'}", *SHORT)
    assert (tmp_path / "run" / "report.html").exists()
    quantize = re.search(r"^qarl (quantize) \S+ \S+ (.*)$", readme, re.MULTILINE)
    model, served = tmp_path / "run/checkpoints/step_000001/model", tmp_path / "served"
    assert f"serve it: vllm serve {served}" in qarl(quantize[1], str(model), str(served), *quantize[2].split())
    assert (served / "config.json").exists()
