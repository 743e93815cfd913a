import pytest
import torch

from qarl_kernels import get_format, quantize_weight
from qarl_nemo.architecture import Architecture
from qarl_nemo.checkpoints.plan import plan_quantization
from qarl_nemo.checkpoints.reader import FLOAT_DTYPES, open_checkpoint
from qarl_nemo.checkpoints.shapes import WEIGHT_SHAPE_BYTES, engine_problems, engine_shard, shape_problems, stored_bytes
from qarl_nemo.files import FileError
from support.whole_models import DENSE, SPARSE, checkpoint_of, shapes_of

EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


def test_stored_bytes_by_hand():
    # int4, N = K = 256, groups of 128: 256 rows x (256 / 8 words x 4 bytes + 2 scales x 2 bytes) + 2 x int64.
    assert stored_bytes((256, 256), get_format("w4a16")) == 256 * (128 + 4) + 16
    # Groups of 32 have 8 scales a row.
    assert stored_bytes((256, 256), get_format("w4a16", group_size=32)) == 256 * (128 + 16) + 16
    # One byte each, and 2 x 2 FP32 scales.
    assert stored_bytes((256, 256), get_format("fp8_block")) == 65536 + 16
    # One byte each, and a FP32 scale a row.
    assert stored_bytes((256, 256), get_format("fp8_channel")) == 65536 + 1024


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "bf16"])
def test_stored_bytes_are_the_quantizers(name):
    fmt = get_format(name)
    stored = quantize_weight(torch.randn(256, 512), fmt).num_bytes
    assert stored_bytes((256, 512), fmt) == stored + (WEIGHT_SHAPE_BYTES if fmt.weight_kind == "int" else 0)


def test_shards_keep_order_and_limit():
    config = DENSE | {"vocab_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 4}
    plan = plan_quantization(checkpoint_of(config), get_format("w4a16"), ["attention"], 70_000)
    # Each attention weight takes 33808 bytes and a norm 512, so two of the former fit into 70000; the embedding alone
    # is larger than a shard, as is a copied weight of the MLP.
    names = [[tensor.info.name.removeprefix("model.layers.0.") for tensor in shard.tensors] for shard in plan.shards]
    assert names[:3] == [
        ["model.embed_tokens.weight"],
        ["input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight"],
        [
            *("self_attn.v_proj.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight"),
            *("self_attn.k_norm.weight", "post_attention_layernorm.weight"),
        ],
    ]
    assert [shard.num_bytes for shard in plan.shards[:3]] == [2**21, 512 + 67616, 67616 + 2 * 128 + 512]
    count = len(plan.shards)
    assert plan.shards[0].file == f"model-00001-of-{count:05d}.safetensors"
    assert plan.shards[-1].file == f"model-{count:05d}-of-{count:05d}.safetensors"
    assert [tensor.info.name for tensor in plan.tensors] == list(shapes_of(config))


def test_the_plan_is_deterministic(source):
    fmt = get_format("w4a16")
    plans = [plan_quantization(open_checkpoint(source), fmt, ["experts"], 500_000) for _ in range(2)]
    assert plans[0] == plans[1]


def test_reasons(source):
    plan = plan_quantization(open_checkpoint(source), get_format("w4a16"), ["experts", "mlp"])
    rows = {tensor.info.name: (tensor.quantized, tensor.reason) for tensor in plan.tensors}
    assert rows["model.layers.0.mlp.experts.0.up_proj.weight"] == (True, "target experts")
    assert rows["model.layers.2.mlp.up_proj.weight"] == (True, "target mlp")
    assert rows["model.layers.0.mlp.gate.weight"] == (False, "the router stays BF16")
    assert rows["model.layers.0.self_attn.q_proj.weight"] == (False, "not a target")
    assert rows["model.embed_tokens.weight"] == (False, "not a linear layer")
    assert sum(quantized for quantized, _ in rows.values()) == 2 * 4 * 3 + 3


def test_every_problem_is_in_one_error():
    narrow, vector = (EXPERT.format(layer=1, expert=expert, part="down") for expert in (0, 3))
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    changes = {narrow: (256, 192), vector: (256,), stacked: (4, 512, 256), "model.norm.weight": None, "extra\n": (2,)}
    with pytest.raises(ValueError, match="cannot quantize") as error:
        plan_quantization(checkpoint_of(SPARSE, changes), get_format("w4a16"), ["experts", "mlp"], max_shard_bytes=0)
    for text in [
        f"of shape [256, 192], config.json implies [256, 256]: {narrow}",
        f"of shape [256], config.json implies [256, 256]: {vector}",
        f"(transformers' save_pretrained): {stacked}",
        "1 tensor missing: model.norm.weight",
        r"1 tensor not part of a qwen3_moe model: 'extra\n'",
        "K=192 is not a multiple of group_size=128",
        "targets that match no weight: mlp; legal targets are experts, attention, mlp",
        "this model has experts (24 weights), attention (8 weights); set --targets experts,attention",
        "max_shard_bytes=0",
    ]:
        assert text in str(error.value)


def test_weights_are_floating_point():
    with pytest.raises(ValueError, match=r"25 tensors of dtype I32, not floating point: lm_head.weight, ") as error:
        plan_quantization(checkpoint_of(DENSE, dtype="I32"), get_format("bf16"), ["mlp"])
    assert "model.layers.{0..1}.self_attn.k_norm.weight and 6 more" in str(error.value)


@pytest.mark.parametrize("where", ["config", "name", "dtype"])
def test_a_quantized_source_is_told_from_a_damaged_one(where):
    packed = {"model.layers.0.self_attn.q_proj.weight_packed": (256, 32)} if where == "name" else {}
    config = SPARSE | ({"quantization_config": {}} if where == "config" else {})
    checkpoint = checkpoint_of(config, packed, dtype="F8_E4M3" if where == "dtype" else "BF16")
    with pytest.raises(ValueError, match=r"already quantized .*start from the BF16 checkpoint") as error:
        plan_quantization(checkpoint, get_format("w4a16"), ["experts"])
    assert "not part of" not in str(error.value)
    assert "match no weight" not in str(error.value)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_whatever_is_floating_point_may_be_quantized(dtype):
    # The names of quantized dtypes begin with F6, too: F6_E2M3.
    assert plan_quantization(checkpoint_of(DENSE, dtype=dtype), get_format("w4a16"), ["mlp"]).shards


def test_large_grids_of_offenders_stay_exact():
    # 2000 = 15.625 x 128 columns in every gate and up; the down projections are not named.
    sizes = {"num_hidden_layers": 48, "num_experts": 128, "hidden_size": 2000, "moe_intermediate_size": 768}
    with pytest.raises(ValueError, match="K=2000") as error:
        plan_quantization(checkpoint_of(SPARSE | sizes), get_format("w4a8"), ["experts"])
    line = next(line for line in str(error.value).splitlines() if "K=2000 is not a multiple of group_size" in line)
    assert line.endswith(
        ": model.layers.{0..47}.mlp.experts.{0..127}.gate_proj.weight, "
        "model.layers.{0..47}.mlp.experts.{0..127}.up_proj.weight"
    )


@pytest.mark.parametrize("config", [DENSE, SPARSE, SPARSE | {"mlp_only_layers": [0]}], ids=["dense", "sparse", "mixed"])
def test_each_tensor_is_needed_in_its_shape(config):
    fmt, targets = get_format("w4a16"), ["attention"]
    plan_quantization(checkpoint_of(config), fmt, targets)
    for name, shape in shapes_of(config).items():
        renamed = {name: None, name.replace("weight", "wait"): shape}
        for changes in ({name: None}, {name: (*shape, 1)}, {name: (0, *shape[1:])}, {name: shape[:-1]}, renamed):
            with pytest.raises(ValueError, match=f"1 tensor (missing|of shape .*): {name}"):
                plan_quantization(checkpoint_of(config, changes), fmt, targets)


def test_thousands_of_problems_are_counted():
    missing = {name: None for name in shapes_of(SPARSE | {"num_hidden_layers": 500}) if ".experts." in name}
    with pytest.raises(ValueError, match="cannot convert source to bf16") as error:
        plan_quantization(
            checkpoint_of(SPARSE | {"num_hidden_layers": 500}, missing), get_format("bf16"), ["attention"]
        )
    assert "6000 tensors missing: model.layers.{0..499}.mlp.experts.{0..3}.down_proj.weight" in str(error.value)
    shapes = {EXPERT.format(layer=e % 2, expert=e % 4, part="gate"): (256, e) for e in range(4)}
    odd = {f"odd{number}.{number}": (1,) for number in range(3000)}
    with pytest.raises(ValueError, match="and 2992 more") as error:
        plan_quantization(checkpoint_of(SPARSE, shapes | odd), get_format("bf16"), ["attention"])
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "qwen3_next", "gemma3_text", "qwen2_moe", "olmoe"])
def test_a_foreign_model_is_refused_by_its_type(model_type):
    checkpoint = checkpoint_of(SPARSE)
    checkpoint.config["model_type"] = model_type
    with pytest.raises(FileError, match=f'model_type is "{model_type}"; supported: qwen3_moe, qwen3, qwen2, llama'):
        plan_quantization(checkpoint, get_format("w4a16"), ["experts"])


def test_what_no_engine_reads_is_dropped_and_said():
    config = DENSE | {"tie_word_embeddings": True, "model_type": "llama"}
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (32,) for layer in range(2)}
    plan = plan_quantization(
        checkpoint_of(config, frequencies | {"lm_head.weight": (64, 256)}), get_format("w4a16"), ["mlp"]
    )
    assert plan.dropped == dict.fromkeys(frequencies, "engines compute rotary frequencies from config.json") | {
        "lm_head.weight": "config.json ties it to the embedding, whose values it has"
    }
    assert {tensor.info.name for tensor in plan.tensors} == set(shapes_of(config))


@pytest.mark.parametrize(
    ("name", "part", "shape", "legal"),
    [
        # Qwen3-30B-A3B: hidden 2048, expert width 768.
        ("w4a16", "gate", (768, 2048), True),
        ("w4a16", "down", (2048, 768), True),
        ("w4a8", "down", (2048, 768), True),
        ("fp8_block", "gate", (768, 2048), True),
        # Expert width 640 = 2.5 x 256 = 5 x 128.
        ("w4a8", "gate", (640, 2048), False),
        ("fp8_block", "gate", (640, 2048), True),
        # 192 rows are no whole 128x128 block: gate and up would share one in the engine's fused weight.
        ("fp8_block", "gate", (192, 2048), False),
        ("fp8_channel", "gate", (192, 2048), True),
        ("fp8_channel", "gate", (200, 2048), False),
        ("int8", "gate", (192, 2048), True),
        ("int8", "down", (2048, 200), False),
        ("nvfp4", "gate", (192, 2048), True),
        ("nvfp4", "gate", (96, 2048), False),
        ("nvfp4", "down", (2048, 192), True),
        ("nvfp4", "down", (2048, 208), False),
        ("w8a16", "gate", (192, 2048), True),
        ("w8a16", "gate", (192, 2112), False),
        ("w8a16", "down", (2048, 192), False),
        # One group of 128 columns is in nobody's way but Marlin's.
        ("w8a16", "down", (2048, 128), False),
        ("fp8_block", "down", (2048, 128), True),
        ("bf16", "gate", (3, 5), True),
    ],
)
def test_shapes_vllm_serves(name, part, shape, legal):
    parameter = EXPERT.format(layer=0, expert=0, part=part)
    assert (not shape_problems(parameter, "experts", shape, get_format(name))) == legal


@pytest.mark.parametrize(
    ("shape", "group_size", "legal"),
    [((256, 128), 128, False), ((256, 128), 64, True), ((128, 128), 128, True), ((256, 256), 128, True)],
)
def test_an_expert_of_one_group_is_not_served(shape, group_size, legal):
    found = shape_problems(
        EXPERT.format(layer=0, expert=0, part="down"), "experts", shape, get_format("w4a16", group_size=group_size)
    )
    assert [problem for problem in found if "is no more than one w4a16 group" in problem] == found
    assert (not found) == legal


@pytest.mark.parametrize(
    ("linear", "shape", "parts", "shard"),
    [
        ("self_attn.q_proj", (4096, 2048), 8, (512, 2048)),
        ("self_attn.o_proj", (2048, 4096), 8, (2048, 512)),
        ("mlp.up_proj", (6144, 2048), 8, (768, 2048)),
        # A part of a column is one more, which no kernel takes for a multiple of what it needs.
        ("mlp.down_proj", (2048, 770), 4, (2048, 193)),
        # Four heads of 128 for eight ranks: each has a whole one.
        ("self_attn.k_proj", (512, 2048), 8, (128, 2048)),
        ("self_attn.v_proj", (512, 2048), 8, (128, 2048)),
        ("self_attn.k_proj", (512, 2048), 2, (256, 2048)),
    ],
)
def test_what_a_rank_holds_by_hand(linear, shape, parts, shard):
    assert engine_shard(f"model.layers.0.{linear}.weight", shape, parts, 128) == shard


@pytest.mark.parametrize(("whole_experts", "targets"), [(False, {"experts", "attention"}), (True, {"attention"})])
def test_ranks_may_share_experts_and_still_cut_attention(whole_experts, targets):
    model, fmt = Architecture.parse(SPARSE, "config.json"), get_format("w4a16")
    assert engine_problems(model, fmt, ["experts", "attention"], 1) == []
    # A quarter of 256 columns is half a group.
    found = engine_problems(model, fmt, ["experts", "attention"], 4, whole_experts=whole_experts)
    assert {target for target, _ in found} == targets
    assert any(line.startswith("o_proj: K=64 is not a multiple of group_size=128") for _, line in found)
    assert {target for target, _ in engine_problems(model, fmt, ["experts"], 4)} == {"experts"}


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_experts_are_not_served_in_widths_of_dense_layers(bits, source):
    fmt = get_format(f"w{bits}a16", own_width=True)
    with pytest.raises(
        ValueError, match=f"serves codes of {bits} bits in dense layers only, experts take 4 and 8"
    ) as error:
        plan_quantization(open_checkpoint(source), fmt, ["experts", "attention"])
    assert "without --own-width: model.layers.{0..1}.mlp.experts.{0..3}.down_proj.weight" in str(error.value)
    assert "self_attn" not in str(error.value)
    plan = plan_quantization(open_checkpoint(source), fmt, ["attention", "mlp"])
    assert {tensor.kind for tensor in plan.tensors if tensor.quantized} == {"attention", "mlp"}


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_codes_in_their_own_width_take_no_bias(bits):
    fmt = get_format(f"w{bits}a16", own_width=True)
    qwen2 = {key: value for key, value in DENSE.items() if key != "head_dim"} | {"model_type": "qwen2"}
    with pytest.raises(
        ValueError, match=r"leaves the bias .* out; take w4a16 or w8a16, or no attention: .*q_proj\.bias"
    ):
        plan_quantization(checkpoint_of(qwen2), fmt, ["mlp", "attention"])
    for config, targets in ((qwen2, ["mlp"]), (DENSE, ["mlp", "attention"])):
        planned = [
            tensor for tensor in plan_quantization(checkpoint_of(config), fmt, targets).tensors if tensor.quantized
        ]
        # A code of 5 bits takes 5, and a group of 128 two bytes.
        assert all(one.num_bytes == one.shape[0] * one.shape[1] * (bits + 16 / 128) / 8 + 16 for one in planned)
