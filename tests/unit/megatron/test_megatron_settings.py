"""Settings under which aligned experts would not be the engine's are one error, before anything is built."""

import pytest
import torch

from qarl_formats import FORMAT_NAMES, get_format

pytest.importorskip("megatron", reason="needs megatron-core: pip install megatron-core==0.16.1")

# isort: split
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from qarl_nemo.config import load_config, write_yaml
from qarl_nemo.layers.weight import MasterChanges
from qarl_nemo.megatron.alignment import Alignment, bump_on_step
from qarl_nemo.megatron.attention_linear import without_extra_state
from qarl_nemo.megatron.checks import require_supported
from qarl_nemo.megatron.spec import align_spec
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.megatron import launch
from qarl_nemo.train.megatron.launch import _ARGUMENTS
from support.runs import make_config


def config(**options) -> TransformerConfig:
    settings = {
        "num_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "moe_ffn_hidden_size": 256,
        "num_moe_experts": 8,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
    }
    made = TransformerConfig(**settings)
    # Megatron refuses some combinations itself; here it is our check that must.
    for name, value in options.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "bf16"])
def test_a_plain_qwen3_moe_is_supported(name):
    require_supported(config(), Alignment(get_format(name)))


def test_what_nemo_rl_sets_for_qwen3_moe_is_supported():
    nemo_rl = {
        "moe_router_dtype": "fp64",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 1e-3,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_pre_softmax": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_overlap": False,
        "moe_permute_fusion": True,
        "moe_enable_routing_replay": True,
        "moe_enable_deepep": False,
        "calculate_per_token_loss": True,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "cuda_graph_impl": "none",
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    }
    require_supported(config(**nemo_rl), Alignment(get_format("w4a16")))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("add_bias_linear", True),
        ("fp8", "e4m3"),
        ("fp8_param", True),
        ("moe_single_grouped_weight", True),
        ("use_transformer_engine_op_fuser", True),
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_apply_probs_on_input", True),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_token_dispatcher_type", "flex"),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", "seq_aux_loss"),
        ("moe_router_force_biased", 1.0),
        ("moe_shared_expert_overlap", True),
        ("delay_wgrad_compute", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("cuda_graph_impl", "local"),
        ("gated_linear_unit", False),
    ],
)
def test_a_setting_that_changes_the_forward_is_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=setting):
        require_supported(config(**{setting: value}), Alignment(get_format("w4a16")))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("normalization", "LayerNorm"),
        ("layernorm_zero_centered_gamma", True),
        ("fp32_residual_connection", True),
        ("fused_residual_rmsnorm", True),
        ("hidden_dropout", 0.1),
        ("rotary_interleaved", True),
        ("fused_single_qkv_rope", True),
        ("multi_latent_attention", True),
        ("no_rope_freq", 4),
        # Of Bridge's providers.
        ("rope_scaling", True),
        ("position_embedding_type", "yarn"),
        ("rotary_percent", 0.5),
    ],
)
def test_a_setting_that_engine_rounding_cannot_follow_is_refused_by_name(setting, value):
    wrong, fmt = config(**{setting: value}), get_format("w4a16")
    with pytest.raises(
        ValueError, match=rf"{setting}=.*; or leave norms and rotation to Megatron: engine_rounding=False"
    ):
        require_supported(wrong, Alignment(fmt, engine_rounding=True))
    require_supported(wrong, Alignment(fmt))


def test_a_graph_is_refused_for_dense_layers_whose_weights_are_quantized_outside_it():
    graphs = config(cuda_graph_impl="local")
    for targets in (("mlp",), ("attention",), ("mlp", "attention")):
        with pytest.raises(ValueError, match=r"cuda_graph_impl='local': .*; set 'none'"):
            require_supported(graphs, Alignment(get_format("w4a16"), targets))
        require_supported(graphs, Alignment(get_format("bf16"), targets))


def test_a_load_balancing_loss_is_refused():
    balanced = config(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.001)
    with pytest.raises(ValueError, match="moe_aux_loss_coeff"):
        require_supported(balanced, Alignment(get_format("w4a16")))


def test_every_problem_is_listed_at_once():
    wrong = config(
        fp8="e4m3", moe_token_dispatcher_type="flex", expert_tensor_parallel_size=4, tensor_model_parallel_size=3
    )
    with pytest.raises(ValueError, match="4 setting") as error:
        require_supported(wrong, Alignment(get_format("w4a16"), targets=("experts", "attention")))
    for part in ("fp8='e4m3'", "flex", "group_size=128", "4 attention heads and 4 KV heads; it may be 1 or 2"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "ranks", "experts", "mlp"),
    [
        ("w4a16", 4, "K=64 is not a multiple of group_size=128", "linear_fc2 shard .* K=64 is not a multiple"),
        ("fp8_block", 4, "a 128-row block would hold gate and up", "a 128-row block would hold gate and up"),
        ("fp8_channel", 2, "scales whole rows", "scales whole rows of linear_fc2"),
        ("w4a8", 2, "scales whole rows", "scales whole rows of linear_fc2"),
        ("bf16", 3, "does not divide", "does not divide ffn_hidden_size=256; it may be 1, 2, 4, 8, 16"),
        ("w4a16", 3, "it may be 1 or 2$", "does not divide ffn_hidden_size=256; it may be 1 or 2$"),
        ("w4a8", 3, "it may be 1$", "does not divide ffn_hidden_size=256; it may be 1$"),
    ],
)
def test_shards_that_a_format_cannot_store_are_refused(name, ranks, experts, mlp):
    with pytest.raises(ValueError, match=experts):
        require_supported(config(expert_tensor_parallel_size=ranks), Alignment(get_format(name)))
    dense = config(num_moe_experts=None, ffn_hidden_size=256, tensor_model_parallel_size=ranks)
    with pytest.raises(ValueError, match=mlp):
        require_supported(dense, Alignment(get_format(name), targets=("mlp",)))


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "bf16"])
def test_a_dense_model_is_supported_whatever_moe_settings_say(name):
    dense = config(num_moe_experts=None, ffn_hidden_size=256, kv_channels=128, moe_token_dispatcher_type="flex")
    require_supported(dense, Alignment(get_format(name), targets=("attention", "mlp")))


@pytest.mark.parametrize(
    ("num_experts", "targets", "problem"),
    [
        (None, ("experts",), "'experts' matches nothing; dense models have 'mlp'"),
        (8, ("mlp",), "'mlp' matches nothing; MoE models have 'experts'"),
        (8, ("attention",), "whose experts must be among them"),
    ],
)
def test_targets_that_match_nothing_are_refused(num_experts, targets, problem):
    spec = get_gpt_layer_local_spec(num_experts=num_experts, normalization="RMSNorm")
    with pytest.raises(ValueError, match=problem):
        align_spec(spec, config(ffn_hidden_size=256), Alignment(get_format("w4a16"), targets), transformer_engine=False)


def test_backends_are_checked():
    with pytest.raises(ValueError, match="legal: kernels, transformer_engine"):
        Alignment(get_format("fp8_block"), backend="cublas")
    with pytest.raises(ValueError, match="has no w4a16"):
        Alignment(get_format("w4a16"), backend="transformer_engine")
    recipe = Alignment(get_format("fp8_block"), backend="transformer_engine")
    with pytest.raises(ValueError, match="build from its spec"):
        align_spec(None, config(), recipe, transformer_engine=False)


def test_a_step_counts_as_a_change_even_if_it_fails():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, changes = torch.optim.SGD([weight], lr=1.0), MasterChanges()
    bump_on_step(optimizer, changes)
    optimizer.step()
    assert changes.count == 1
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure=lambda: 1 / 0)
    assert changes.count == 2


def test_quantized_weights_are_gone_while_a_step_runs():
    linear = torch.nn.Linear(64, 64, bias=False)
    alignment = Alignment(get_format("int8"))
    linear.aligned = alignment.weight("linear", linear.weight)
    before, held = linear.aligned.quantized(), []
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    linear.weight.grad = torch.ones_like(linear.weight)
    optimizer.register_step_pre_hook(lambda *_: held.append(linear.aligned._quantized))
    bump_on_step(optimizer, alignment.changes, [linear])
    optimizer.step()
    assert held == [None]
    assert not torch.equal(linear.aligned.quantized().tensors["weight"], before.tensors["weight"])


class Stateful(torch.nn.Linear):
    """Has an extra state, as Transformer-Engine's norms do."""

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        assert state is None


def test_a_norm_of_its_own_has_no_extra_state_in_checkpoints():
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    separate = torch.nn.Sequential(without_extra_state(Stateful(2, 2)))
    assert list(separate.state_dict()) == list(plain.state_dict())
    separate.load_state_dict(plain.state_dict())
    plain.load_state_dict(separate.state_dict())
    assert list(torch.nn.Sequential(Stateful(2, 2)).state_dict()) != list(plain.state_dict())


@pytest.mark.parametrize("name", [*FORMAT_NAMES, "w3a16", "w5a16"])
def test_ranks_of_a_learner_can_send_each_other_a_format(name, tmp_path):
    fmt = get_format(name)
    torch.save(fmt, tmp_path / "call")
    with torch.serialization.safe_globals(list(_ARGUMENTS)):
        assert torch.load(tmp_path / "call", weights_only=True) == fmt


def test_text_that_looks_like_a_reference_reaches_every_rank_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "launch_ranks", lambda *given: write_yaml(tmp_path / "ranks.yaml", given[-1]))
    monkeypatch.setattr(launch, "require_machine", lambda *_: None)
    train_set = {"data_path": "problems.jsonl", "prompt_template": "Write ${x}$ for {problem}"}
    data = {"_override_": True, "source": "datasets", "train": train_set}
    config = make_config(tmp_path, policy={"megatron_cfg": {"num_gpus": 2}}, data=data)
    launch.train_with_megatron(config)
    assert load_config(tmp_path / "ranks.yaml", [], LocalConfig) == config
