import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from support.programs import environment
from support.whole_models import SPARSE, tensors_of

MEBI = 2**20
CONVERT = """
import re, sys
from pathlib import Path
import torch
from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint

torch.set_num_threads(1)
quantize_checkpoint(sys.argv[1], sys.argv[2], get_format("fp8_channel"), ["experts"], max_shard_bytes=int(sys.argv[3]))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def write_source(folder, num_layers):
    """Write layers whose experts are quantized and whose attention, as large, is copied; return the size in MiB."""
    folder.mkdir()
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 1, "num_experts_per_tok": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    config = SPARSE | sizes | heads | {"num_hidden_layers": num_layers}
    tensors = tensors_of(config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values()) / MEBI


def peak_mebibytes(source, destination, shard_bytes):
    """Convert in a process of its own; VmHWM and not ru_maxrss, which a child inherits from the process it left."""
    command = [sys.executable, "-c", CONVERT, str(source), str(destination), str(shard_bytes)]
    run = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return int(run.stdout) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak from Linux' /proc")
def test_peak_memory_does_not_grow_with_the_model(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    added = -write_source(small, 8) + write_source(large, 32)

    def growth(shard_bytes):
        peaks = [
            peak_mebibytes(folder, tmp_path / f"{folder.name}{shard_bytes}", shard_bytes) for folder in (small, large)
        ]
        return peaks[1] - peaks[0]

    bounded, unbounded = growth(16 * MEBI), growth(2**40)
    assert bounded < 0.25 * added
    # Everything in one shard: the measure sees a conversion that is not bounded.
    assert unbounded > 0.4 * added
