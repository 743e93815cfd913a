"""Megatron's benches on two gloo processes of a CPU, tiny.

`torchrun --nproc-per-node 2 -m support.megatron.run_benches <folder>`
"""

import argparse
import json
import sys
import weakref
from pathlib import Path

from support.megatron import on_cpu  # before any Megatron module

# isort: split
import megatron_rows
import megatron_step
import publish
import torch.distributed as dist
from megatron_model import Layout, parallel, process_group, transformer_config

# isort: split
from qarl_kernels import get_format
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.publish import publish_layers, publish_update
from qarl_nemo.memory import ModelSize
from qarl_nemo.refit.manifest import Manifest
from support.megatron.compare import published

SIZES = {"num_layers": 2, "num_experts": 4, "top_k": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
ARCHITECTURE = ModelSize(**SIZES, hidden=128, inner=128, vocab_size=64)


def step_rows(folder: Path) -> list[dict]:
    """Rows of the step bench."""
    options = argparse.Namespace(
        variants=["megatron", "bf16", "w4a16", "w4a16+er", "fp8_block+hp"],
        ep=[2],
        tokens=[32, 64],
        sequence=32,
        microbatches=2,
        optimizer="adam",
        recompute="none",
        repeats=1,
        profile=folder,
        raw=folder / "raw.json",
        record=folder / "rows.json",
        architecture=ARCHITECTURE,
    )
    sys.argv[1:] = ["--tokens", "32,64", "--recompute", "none", "--record", str(options.record)]
    return megatron_rows.step_rows(megatron_step.bench(options), dist.get_world_size())


def publish_rows() -> list[dict]:
    """Rows of the publishing bench."""
    options = argparse.Namespace(
        layouts=["ep2", "tp2_etp2"], formats=["w4a16", "bf16"], repeats=1, raw=None, architecture=ARCHITECTURE
    )
    whole = 2 * ARCHITECTURE.num_parameters
    sys.argv[1:] = ["--layouts", "ep2,tp2_etp2", "--layers", "2"]
    return publish.publish_rows(publish.bench(options), dist.get_world_size(), whole)


def streamed() -> dict[str, bool]:
    """What a streamed update of expert parallel ranks is, beside the whole."""
    alignment, layout = Alignment(get_format("w4a16")), Layout(ep=2)
    with parallel(layout):
        model = publish.gpt_model(ARCHITECTURE, transformer_config(ARCHITECTURE, layout), alignment, with_output=True)
        whole = dict(published([model], vocab_size=64))
        manifest = Manifest.of([whole], version=0, fmt="w4a16")
        with publish_update([model], alignment.format, vocab_size=64, version=0) as update:
            # One rank's push ends half-way, the others' never began; no rank waits for another in the end.
            sent = next(update.layer_by_layer()) if dist.get_rank() == 0 else {}
        layers = publish_layers([model], vocab_size=64)
        next(layers)
        experts = [weakref.ref(tensor) for name, tensor in next(layers).items() if "experts" in name]
        held = [reference() is not None for reference in experts]
        next(layers)
        return {
            "held": len(experts) == 4 and all(held),
            "forgotten": all(reference() is None for reference in experts),
            "manifest": update.manifest == manifest,
            "bytes": update.num_bytes == sum(tensor.nbytes for tensor in whole.values()),
            "one layer": len(sent) < len(whole),
        }


def main(folder: Path) -> None:
    """Write what each bench gave."""
    with process_group() as rank, on_cpu.CudaMeansCpu():
        results = {"step": step_rows(folder), "publish": publish_rows(), "streamed": streamed()}
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
