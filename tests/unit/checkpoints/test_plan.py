import pytest
import torch

from qarl_kernels import get_format, quantize_weight
from qarl_nemo.checkpoints.plan import plan_quantization
from qarl_nemo.checkpoints.reader import Checkpoint, TensorInfo, open_checkpoint
from qarl_nemo.checkpoints.shapes import WEIGHT_SHAPE_BYTES, shape_problems, stored_bytes

EXPERT = "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


def checkpoint_of(shapes, config=None, dtype="BF16"):
    infos = tuple(TensorInfo(name, shape, dtype, ("model.safetensors",)) for name, shape in shapes.items())
    return Checkpoint(None, None, config or {}, infos, None)


def test_stored_bytes_by_hand():
    # int4, N = K = 256, groups of 128: 256 rows x (256 / 8 words x 4 bytes + 2 scales x 2 bytes) + 2 x int64.
    assert stored_bytes((256, 256), get_format("w4a16")) == 256 * (128 + 4) + 16
    # Groups of 32 have 8 scales a row.
    assert stored_bytes((256, 256), get_format("w4a16", group_size=32)) == 256 * (128 + 16) + 16
    # One byte each, and 2 x 2 FP32 scales.
    assert stored_bytes((256, 256), get_format("fp8_block")) == 65536 + 16
    # One byte each, and a FP32 scale a row.
    assert stored_bytes((256, 256), get_format("fp8_channel")) == 65536 + 1024


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "fp8_channel", "bf16"])
def test_stored_bytes_are_the_quantizers(name):
    fmt = get_format(name)
    stored = quantize_weight(torch.randn(256, 512), fmt).num_bytes
    assert stored_bytes((256, 512), fmt) == stored + (WEIGHT_SHAPE_BYTES if fmt.weight_kind == "int" else 0)


def test_shards_keep_order_and_limit():
    shapes = {f"model.layers.{layer}.self_attn.q_proj.weight": (256, 256) for layer in range(5)}
    shapes["model.embed_tokens.weight"] = (1024, 1024)
    # Each attention weight takes 33808 bytes, so two fit into 70000; the embedding alone is larger than a shard.
    plan = plan_quantization(checkpoint_of(shapes), get_format("w4a16"), ["attention"], 70_000)
    assert [len(shard.tensors) for shard in plan.shards] == [2, 2, 1, 1]
    assert [shard.num_bytes for shard in plan.shards] == [67616, 67616, 33808, 2**21]
    assert [shard.file for shard in plan.shards][::3] == [
        "model-00001-of-00004.safetensors",
        "model-00004-of-00004.safetensors",
    ]
    assert [tensor.info.name for tensor in plan.tensors] == list(shapes)


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


def test_every_problem_and_every_name_in_one_error(make_source):
    weight = torch.zeros(256, 256, dtype=torch.bfloat16)
    narrow = [EXPERT.format(layer=layer, expert=expert, part="down") for layer, expert in [(0, 0), (0, 1), (3, 2)]]
    tensors = {name: torch.zeros(256, 192, dtype=torch.bfloat16) for name in narrow}
    integers = EXPERT.format(layer=1, expert=0, part="up")
    vector = EXPERT.format(layer=1, expert=0, part="gate")
    packed = "model.layers.1.self_attn.q_proj.weight_packed"
    stacked = "model.layers.4.mlp.experts.gate_up_proj"
    tensors |= {
        integers: weight.to(torch.int32),
        vector: weight[0].clone(),
        packed: torch.zeros(4, dtype=torch.int32),
        stacked: torch.zeros(2, 4, 4),
        EXPERT.format(layer=5, expert=0, part="up"): weight,
    }
    checkpoint = open_checkpoint(make_source(tensors, {"quantization_config": {}}))
    with pytest.raises(ValueError, match="cannot quantize") as error:
        plan_quantization(checkpoint, get_format("w4a16"), ["experts", "mlp"], max_shard_bytes=0)
    text = str(error.value)
    for name in [*narrow, integers, vector, packed, stacked]:
        assert name in text
    assert "K=192 is not a multiple of group_size=128" in text
    assert "I32 weights are not floating point" in text
    assert "already quantized" in text
    assert "targets that match no weight: mlp; legal targets are experts, attention, mlp" in text
    assert "this model has experts (6 weights)" in text
    assert "max_shard_bytes=0" in text
    assert EXPERT.format(layer=5, expert=0, part="up") not in text


def test_large_grids_of_offenders_stay_exact():
    # 2000 = 15.625 x 128 columns in every gate; the one legal weight is not named.
    shapes = {EXPERT.format(layer=layer, expert=e, part="gate"): (768, 2000) for layer in range(48) for e in range(128)}
    shapes[EXPERT.format(layer=0, expert=0, part="up")] = (768, 2048)
    with pytest.raises(ValueError, match="K=2000") as error:
        plan_quantization(checkpoint_of(shapes), get_format("w4a8"), ["experts"])
    assert "model.layers.{0..47}.mlp.experts.{0..127}.gate_proj.weight" in str(error.value)
    assert "up_proj" not in str(error.value)


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
    assert [problem for problem in found if "is one w4a16 group" in problem] == found
    assert (not found) == legal


def test_experimental_formats_have_no_engine(source):
    with pytest.raises(ValueError, match="w3a16 is experimental"):
        plan_quantization(open_checkpoint(source), get_format("w3a16"), ["experts"])


def test_a_foreign_model_is_told_what_it_lacks():
    checkpoint = checkpoint_of({"model.layers.0.block_sparse_moe.experts.0.w1.weight": (256, 256)})
    with pytest.raises(ValueError, match="this model has none of them"):
        plan_quantization(checkpoint, get_format("w4a16"), ["experts"])
