"""What a host is computed to hold, against what hosts of whole steps held (docs/results/full_size.json)."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from qarl_nemo.memory import GIB, Learner, ModelSize, Parallelism, engine_bytes, host_memory
from qarl_nemo.memory.host import HOST_PARTS, backup_bytes, pinned_bytes
from qarl_nemo.memory.units import HOST_BYTES, PROCESS_BYTES

ROOT = Path(__file__).parents[2]
MODEL = ModelSize.read(ROOT / "examples" / "models" / "qwen3-30b-a3b")
HALF = replace(MODEL, num_layers=24)
# The goal, which every measured second keeps but those in which Megatron copied parameters twice.
MOST = 0.05


def served(name: str) -> Learner:
    # As the recipes have it.
    targets = ("experts",) if name == "w4a8" else ("experts", "attention")
    return Learner(format=name, targets=targets, optimizer="adam_bf16")


def on_host(name: str, *, model=HALF, ranks=None, parameters_leave: bool, **changes) -> dict[str, float]:
    # What the engines of most runs did not yet.
    arm = {"gpus": 2, "engine_tp": 1, "engines_forget": False, "optimizer_leaves": False}
    arm |= {"parameters_leave": parameters_leave} | changes
    return host_memory(model, ranks or Parallelism(2, ep=2), served(name), served(name), **arm)


def on_four(arm: str) -> dict[str, float]:
    name = next((name for name in ("w4a16", "w4a8", "fp8_block") if arm.startswith(name)), "bf16")
    engines = 2 if name == "bf16" else 1
    recipe = arm == "nemo_rl_a"
    ranks = Parallelism(4, tp=2 if recipe else 1, ep=4)
    leave = {"parameters_leave": arm.startswith("nemo_rl"), "optimizer_leaves": recipe}
    return on_host(name, model=MODEL, ranks=ranks, gpus=4, engine_tp=engines, **leave)


def measured() -> dict[str, float]:
    file = ROOT / "docs" / "results" / "full_size.json"
    return {row["name"]: row["value"] for row in json.loads(file.read_text())}


def test_pinned_blocks_are_powers_of_two():
    assert [pinned_bytes(size) for size in (1, 2, 2**20, 2**20 + 1, 768 * 2**20)] == [1, 2, 2**20, 2**21, 2**30]


# NeMo-RL's own worker always parts with its parameters; ours printed whether they left.
ON_TWO = [
    ("w4a16_a24", "w4a16"),
    ("w4a16_a24_even", "w4a16"),
    ("bf16_a24", "bf16"),
    ("bf16_a24_even", "bf16"),
    ("nemo_rl_best_a24", "bf16"),
    ("nemo_rl_best_b24", "bf16"),
]
ON_FOUR = [
    *("w4a16_a", "w4a16_second_a", "w4a16_third_a", "w4a16_a_even", "w4a8_a", "fp8_block_a", "bf16_a"),
    *("nemo_rl_best_a", "nemo_rl_best_a_even", "nemo_rl_best_beside_a_even", "nemo_rl_best_newest_a", "nemo_rl_a"),
]
# Which miss the goal, as the page says, and by how much at most.
MISSED = {"w4a8_a": 0.065, "w4a16_linear_1_a12_1gpu": 0.07}


def test_a_tied_head_sleeps_once():
    # 151936 x 2048 in BF16 are 0.58 GiB, of which a block takes one.
    untied, tied = (backup_bytes(replace(MODEL, tied_head=kind), served("w4a16"), 1) for kind in (False, True))
    assert untied - tied == GIB


@pytest.mark.parametrize(("arm", "name"), ON_TWO)
@pytest.mark.parametrize("phase", ["rollout", "prev_logprobs", "update"])
def test_a_host_of_two_gpus_holds_what_is_computed(arm, name, phase):
    row = measured()[f"full_memory_host_gib_{phase}_{arm}"]
    parts = on_host(name, parameters_leave=name == "bf16")
    assert sum(parts.values()) / GIB == pytest.approx(row, rel=MOST)
    # Tensors alone, or blocks that waste nothing, are far from it.
    tensors = 2 * engine_bytes(HALF, served(name), 1) + parts["parameters"] + parts["processes"]
    assert tensors / GIB != pytest.approx(row, rel=MOST)


@pytest.mark.parametrize("arm", ON_FOUR)
@pytest.mark.parametrize("phase", ["rollout", "prev_logprobs", "update", "refit"])
def test_a_host_of_four_gpus_holds_what_is_computed(arm, phase):
    row = measured()[f"full_memory_host_gib_{phase}_{arm}"]
    parts = on_four(arm)
    assert sum(parts.values()) / GIB == pytest.approx(row, rel=MISSED.get(arm, MOST))
    # Pinned memory alone is far from it.
    assert (sum(parts.values()) - parts["processes"]) / GIB != pytest.approx(row, rel=MOST)


# Runs since ours forget, with their layers and GPUs; docs/evidence/full_size_memory.md says which came after the fit.
FORGETFUL = [
    ("w4a16_a12_1gpu", "w4a16", 12, 1),
    ("w4a16_linear_1_a12_1gpu", "w4a16", 12, 1),
    ("w4a16_linear_0_a12_1gpu", "w4a16", 12, 1),
    ("w4a16_a12_2gpu", "w4a16", 12, 2),
    ("fp8_block_a24", "fp8_block", 24, 2),
    ("bf16_second_a24", "bf16", 24, 2),
    ("w4a16_answers_a24", "w4a16", 24, 2),
    ("w4a16_answers_a24_128", "w4a16", 24, 2),
    ("w4a16_answers_a24_256", "w4a16", 24, 2),
    ("w4a16_marlin_a24_even", "w4a16", 24, 2),
    ("w4a16_experts_a24_even", "w4a16", 24, 2),
    ("w4a16_b24", "w4a16", 24, 2),
    ("w4a16_pair_a24_even", "w4a16", 24, 2),
    ("bf16_pair_a24_even", "bf16", 24, 2),
    ("w4a16_b12", "w4a16", 12, 2),
    ("w4a16_decoding_a", "w4a16", 48, 4),
    ("w4a16_decoding_a_even", "w4a16", 48, 4),
    ("w4a16_beside_a_even", "w4a16", 48, 4),
    ("w4a16_linear_a_even", "w4a16", 48, 4),
    ("bf16_a_even", "bf16", 48, 4),
    ("fp8_block_a_even", "fp8_block", 48, 4),
    ("fp8_channel_a_even", "fp8_channel", 48, 4),
    ("w4a16_newest_a", "w4a16", 48, 4),
    ("w4a16_b", "w4a16", 48, 4),
    ("bf16_b", "bf16", 48, 4),
    ("w4a16_larger_a", "w4a16", 48, 4),
    ("w4a16_growing_a", "w4a16", 48, 4),
    ("w4a16_a24_4gpu", "w4a16", 24, 4),
]


def forgetful(name: str, layers: int, gpus: int, *, engines_forget: bool = True) -> float:
    model = replace(MODEL, num_layers=layers)
    ranks = Parallelism(gpus, ep=gpus)
    arm = {"model": model, "ranks": ranks, "gpus": gpus, "engines_forget": engines_forget, "parameters_leave": False}
    return sum(on_host(name, **arm).values()) / GIB


@pytest.mark.parametrize(("arm", "name", "layers", "gpus"), FORGETFUL)
@pytest.mark.parametrize("phase", ["rollout", "prev_logprobs", "update", "refit"])
def test_engines_that_forget_leave_nothing_on_a_host(arm, name, layers, gpus, phase):
    if (arm, phase) == ("w4a16_b12", "refit"):
        pytest.skip("its refits took less than the second between two readings")
    row = measured()[f"full_memory_host_gib_{phase}_{arm}"]
    assert forgetful(name, layers, gpus) == pytest.approx(row, rel=MISSED.get(arm, MOST))
    assert forgetful(name, layers, gpus, engines_forget=False) > 1.2 * row


def muon(name: str, *, parameters_leave: bool) -> float:
    model, ranks = replace(MODEL, num_layers=8), Parallelism(2, tp=2, ep=2)
    learner = replace(served(name), optimizer="muon", optimizer_whole=True)
    leave = {"parameters_leave": parameters_leave, "optimizer_leaves": True}
    return sum(host_memory(model, ranks, learner, learner, gpus=2, engine_tp=1, engines_forget=True, **leave).values())


@pytest.mark.parametrize(
    "arm",
    [
        *("w4a16_2gpu", "w4a16_kept_2gpu", "bf16_2gpu", "w4a8_2gpu", "fp8_channel_2gpu", "fp8_block_2gpu"),
        *("w4a16_single_2gpu", "bf16_single_2gpu", "fp8_block_single_2gpu"),
        *("w4a16_level1_2gpu_unequal", "w4a16_level0_2gpu_unequal"),
    ],
)
@pytest.mark.parametrize("phase", ["rollout", "prev_logprobs", "update", "refit"])
def test_a_host_holds_muons_state_and_no_parameters(arm, phase):
    row = measured()[f"full_memory_host_gib_{phase}_{arm}"] * GIB
    name = re.match(r"bf16|w4a16|w4a8|fp8_block|fp8_channel", arm).group()
    assert muon(name, parameters_leave=False) == pytest.approx(row, rel=MOST)
    assert muon(name, parameters_leave=True) > 1.2 * row


def test_the_page_says_what_is_computed():
    page = (ROOT / "docs" / "evidence" / "full_size_memory.md").read_text()
    int4, bf16 = (sum(on_host(name, parameters_leave=name == "bf16").values()) / GIB for name in ("w4a16", "bf16"))
    assert f"| `w4a16_a24`, `w4a16_a24_even` | {int4:.1f} GiB |" in page
    assert f"| `bf16_a24`, `bf16_a24_even` | {bf16:.1f} GiB |" in page
    assert f"| `nemo_rl_best_a24`, `nemo_rl_best_b24` | {bf16:.1f} GiB |" in page
    for arms in (
        "`w4a16_a`, `w4a16_second_a`, `w4a16_third_a`, `w4a16_a_even`",
        "`w4a8_a`",
        "`fp8_block_a`",
        "`bf16_a`",
        "`nemo_rl_best_a`, `nemo_rl_best_a_even`, `nemo_rl_best_beside_a_even`, `nemo_rl_best_newest_a`",
        "`nemo_rl_a`",
    ):
        assert f"| {arms} | {sum(on_four(arms.split('`')[1]).values()) / GIB:.1f} GiB |" in page
    recipes = muon("w4a16", parameters_leave=False) / GIB
    for arms in (
        "`w4a16_single_2gpu`, `bf16_single_2gpu`, `fp8_block_single_2gpu`",
        "`w4a16_2gpu`, `w4a16_kept_2gpu`, `bf16_2gpu`, `w4a8_2gpu`, `fp8_channel_2gpu`",
        "`fp8_block_2gpu`, `w4a16_level1_2gpu_unequal`, `w4a16_level0_2gpu_unequal`",
    ):
        assert f"| {arms} | {recipes:.1f} GiB |" in page
    lines = page.partition("## The host's memory")[2].splitlines()
    for arm, name, layers, gpus in FORGETFUL:
        line = next(line for line in lines if line.startswith("| ") and f"`{arm}`" in line)
        assert f"| {forgetful(name, layers, gpus):.1f} GiB |" in line


@pytest.mark.parametrize("arm", ["bf16_a24", "bf16_a24_even"])
def test_parameters_that_leave_for_the_first_time_lie_there_twice(arm):
    # Megatron copies them into pageable memory, and that into pinned: for a while 13.5 GiB a rank more.
    twice = 2 * 2 * HALF.num_layers * HALF.expert_parameters / 2
    held = sum(on_host("bf16", parameters_leave=True).values())
    row = measured()[f"full_memory_host_gib_refit_{arm}"]
    assert (held + twice) / GIB == pytest.approx(row, rel=MOST)
    assert held / GIB != pytest.approx(row, rel=MOST)


def test_what_stays_on_the_gpu_takes_no_host_memory():
    stays, leaves = (on_host("w4a16", parameters_leave=out, optimizer_leaves=out, gpus=8) for out in (False, True))
    assert tuple(stays) == HOST_PARTS
    assert stays["parameters"] == stays["optimizer"] == 0
    assert stays["processes"] == 8 * PROCESS_BYTES + HOST_BYTES
    # Experts 13.5 GiB and the rest 2.02, each in one block.
    assert leaves["parameters"] == 8 * (16 + 4) * GIB
    assert leaves["engines"] == stays["engines"]
    # An optimizer that is always there is so wherever parameters are.
    offloaded = replace(served("w4a16"), optimizer="offloaded")
    arm = {"gpus": 1, "engine_tp": 1, "engines_forget": True, "parameters_leave": False, "optimizer_leaves": False}
    # Adam's master and two moments, SGD's master and momentum.
    for one, num_bytes in ((offloaded, 12), (replace(offloaded, leaves_to_adam=False), 8)):
        held = host_memory(HALF, Parallelism(2, ep=2), one, one, **arm)["optimizer"]
        assert held == num_bytes * HALF.num_parameters / 2


@pytest.mark.parametrize("name", ["w4a16", "w4a8", "fp8_block", "nvfp4", "bf16"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 4)])
def test_a_sleeping_engine_takes_as_much_as_its_weights_and_less_than_twice(name, tp, ep):
    weights = engine_bytes(MODEL, served(name), tp, ep)
    assert 0.99 * weights < backup_bytes(MODEL, served(name), tp, ep) < 2 * weights


def test_dense_models_have_an_mlp_to_copy():
    dense = replace(MODEL, num_experts=0, top_k=0, tied_head=True)
    targets = replace(served("w4a16"), targets=("mlp",))
    assert engine_bytes(dense, targets, 1) < backup_bytes(dense, targets, 1) < 2 * engine_bytes(dense, targets, 1)
