"""Build Megatron-core GPTModels on a CPU and save them: `... JOBS`, one job after another, each on ranks of its own.

JOBS is a JSON list. A job has `config` (a Hugging Face config), `ranks`, `parallel` (keywords of
initialize_model_parallel), `save`, and optionally `load`, `hf_model` (loaded by Megatron-Bridge), `logits`, `metadata`
and `moe_layer_freq`.
"""

import contextlib
import importlib.machinery
import json
import sys
import types
from pathlib import Path

import torch
import torch.multiprocessing as mp


def main():
    """Import once, then fork the ranks of each job."""
    torch.set_num_threads(1)
    pretend_cuda()
    from megatron.core import dist_checkpointing  # noqa: F401
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401

    for job in json.loads(sys.argv[1]):
        mp.start_processes(save, args=(job,), nprocs=job["ranks"], start_method="fork")


def save(rank, job):
    """Build or load, compute logits if asked, save."""
    from megatron.core import dist_checkpointing, parallel_state

    store = f"file://{job['save']}.store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=job["ranks"])
    parallel_state.initialize_model_parallel(**job["parallel"])
    model = build(job)
    metadata = job.get("metadata", {})
    if "load" in job:
        state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, job["load"])
        model.load_state_dict(state["model"])
    if "hf_model" in job:
        pretend_transformer_engine()
        from megatron.bridge import AutoBridge

        AutoBridge.from_hf_pretrained(job["hf_model"]).load_hf_weights([model])
    if "logits" in job:
        tokens = torch.arange(24).reshape(2, 12) * 5 % job["config"]["vocab_size"]
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
        with torch.no_grad():
            logits = model(tokens, torch.arange(12).expand(2, 12), mask)
        torch.save({"tokens": tokens, "logits": logits}, job["logits"])
    if rank == 0:
        Path(job["save"]).mkdir()
    torch.distributed.barrier()
    state = {"model": model.sharded_state_dict(metadata=metadata), "iteration": 3}
    dist_checkpointing.save(state, job["save"])
    torch.distributed.destroy_process_group()


def pretend_cuda():
    """Replace what Megatron-core asks of CUDA on its way through a forward and a save."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    class RMSNorm(torch.nn.RMSNorm):
        def __init__(self, config, hidden_size, eps):
            super().__init__(hidden_size, eps=eps)
            self.weight.sequence_parallel = config.sequence_parallel

    def make_norm(cls, config, hidden_size, eps=1e-5, **_):
        return RMSNorm(config, hidden_size, eps)

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(make_norm)
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    # 0.16 defines it with Transformer-Engine only, and asks for it without.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def pretend_transformer_engine():
    """Let Megatron-Bridge's adapters, which nothing here uses, import Transformer-Engine and annotate with it."""

    class Anything(type):
        def __getattr__(cls, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Something

    class Something(metaclass=Anything):
        pass

    engine = types.ModuleType("transformer_engine")
    engine.pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.pytorch.__getattr__ = lambda name: getattr(Something, name)
    for module in (engine, engine.pytorch):
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


def _config(hf, freq, parallel):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf["intermediate_size"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        num_moe_experts=hf["num_local_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_layer_freq=freq,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        sequence_parallel=parallel.get("tensor_model_parallel_size", 1) > 1,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **parallel,
    )


def build(job):
    """Return the model with random weights, the same on every run."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    hf, freq = job["config"], job.get("moe_layer_freq", 1)
    config = _config(hf, freq, job["parallel"])
    if isinstance(freq, list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.eval()


if __name__ == "__main__":
    main()
