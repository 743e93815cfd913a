"""Settings that change how a run computes: precision, device, memory, batch sizes, optimizer."""

import pytest
import torch

from qarl_nemo.metrics.report import write_report
from qarl_nemo.train.setup import resolve_device
from support.asserts import FP32_NATS
from support.runs import QARL, make_config, read_metrics, train, without_clocks


def test_bfloat16_keeps_the_sides_together(tmp_path):
    aligned = train(tmp_path / "aligned", policy={"precision": "bfloat16"})
    train(tmp_path / "apart", policy={"precision": "bfloat16"}, qarl={"alignment": "rollout_only"})
    assert {parameter.dtype for parameter in aligned.model.parameters()} == {torch.bfloat16}
    assert {master.dtype for master in aligned.learner.policy.optimizer.masters.values()} == {torch.float32}
    gaps = [[record["mismatch/abs_gap_mean"] for record in read_metrics(tmp_path / n)] for n in ("aligned", "apart")]
    # roundings to BF16 against roundings to int4, as in unit/train/test_sampler_alignment.py
    assert sum(gaps[0]) < sum(gaps[1]) / 8
    assert any(record["optim/grad_norm"] > 0 for record in read_metrics(tmp_path / "aligned"))


SAME_NUMBERS = {
    "repacked at each use": {"rollout": {"keep_operand": False}},
    "unpacked at each use by the learner": {"qarl": {"keep_operand": False}},
    "activations computed twice": {"policy": {"activation_checkpointing": True}},
    "checkpoints at other steps": {"checkpointing": {"save_period": 1, "keep_last": 1}},
    "no checkpoints": {"checkpointing": {"enabled": False}},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("reference")
    train(run_dir)
    return without_clocks(read_metrics(run_dir))


@pytest.mark.parametrize("blocks", SAME_NUMBERS.values(), ids=SAME_NUMBERS)
def test_what_only_saves_or_moves_changes_no_number(blocks, reference, tmp_path):
    train(tmp_path, **blocks)
    assert without_clocks(read_metrics(tmp_path)) == reference
    assert (tmp_path / "checkpoints").exists() == (blocks != SAME_NUMBERS["no checkpoints"])


ROUNDINGS = {
    "other rows": {"train_micro_batch_size": 3, "logprob_batch_size": 7},
    "tokens": {"sequence_packing": {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 33}},
}


@pytest.mark.parametrize("policy", ROUNDINGS.values(), ids=ROUNDINGS)
def test_micro_batches_change_roundings_only(policy, reference, tmp_path):
    train(tmp_path, policy=policy)
    # the first step's update; later ones start from weights that differ in their last bits
    first = without_clocks(read_metrics(tmp_path))[0]
    for key in ("reward/mean", "loss/entropy", "loss/kl_k3", "optim/grad_norm", "prox_ratio/p99"):
        assert first[key] == pytest.approx(reference[0][key], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param({"loss_fn": {"mismatch_cap": 1.01}, "qarl": {"alignment": "rollout_only"}}, id="other method"),
        pytest.param({"policy": {"optimizer": {"lr": 2e-3}}}, id="learning rate"),
        pytest.param({"rollout": {"temperature": 0.9}}, id="temperature"),
        pytest.param({"rollout": {"top_p": 0.5}}, id="top-p"),
        pytest.param({"qarl": {"backward": "high_precision"}}, id="backward"),
        pytest.param({"qarl": {"scale_convention": "narrow_range"}}, id="scale convention"),
        pytest.param({"grpo": {"normalize_rewards": False}}, id="advantages"),
        # the first minibatch's routes are the learner's own either way, the second's are not
        pytest.param({"qarl": {"router_replay": False}}, id="router replay"),
    ],
)
def test_every_other_setting_reaches_the_numbers(blocks, reference, tmp_path):
    train(tmp_path, **blocks)
    records = without_clocks(read_metrics(tmp_path))
    assert records != reference
    assert all(record["optim/skipped_steps"] == 0 for record in records)


def test_rollout_batches_of_any_size_are_joined(tmp_path):
    train(tmp_path, rollout={"batch_size": 5})
    records = read_metrics(tmp_path)
    assert {record["loss/num_valid_seqs"] for record in records} == {32}
    assert max(record["mismatch/abs_gap_mean"] for record in records) < FP32_NATS


def test_a_report_reads_what_a_run_wrote(tmp_path):
    train(tmp_path / "ours", run={"arm": "ours"})
    train(tmp_path / "bf16", run={"arm": "bf16"}, qarl=QARL["bf16"])
    page = write_report([tmp_path / "ours", tmp_path / "bf16"], tmp_path / "report.html").read_text()
    assert "ours" in page
    assert "bf16" in page


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device=cuda, but torch sees no CUDA device"):
        resolve_device("cuda")


def test_a_format_option_that_does_not_fit_is_refused_before_a_folder_is_made(tmp_path):
    with pytest.raises(ValueError, match="takes no group_size=32"):
        train(tmp_path / "run", qarl={"format": "fp8_block"})
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", QARL)
def test_a_gpu_trains_aligned(name, precision, tmp_path):
    trainer = train(tmp_path, device="cuda", policy={"precision": precision}, qarl=QARL[name])
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cuda"}
    records = read_metrics(tmp_path)
    # FP8 and BF16 round: batches of other shapes may put a value on the other side of a rounding boundary
    exact = precision == "float32" and QARL[name]["format"] not in ("w4a8", "fp8_block", "fp8_channel", "int8")
    assert max(record["mismatch/abs_gap_mean"] for record in records) < (FP32_NATS if exact else 2e-2)
    assert any(record["optim/grad_norm"] > 0 for record in records)
    assert records[-1]["memory/device_peak_bytes"] > 0


@pytest.mark.gpu
def test_a_gpu_run_resumes_from_its_checkpoint(tmp_path):
    train(tmp_path, device="cuda", grpo={"max_num_steps": 2})
    train(tmp_path, device="cuda")
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert make_config(tmp_path, device="cuda").device == "cuda"
