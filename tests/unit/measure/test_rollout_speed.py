"""What `qarl doctor --rollout` refuses before an engine starts, and what it concludes from measurements."""

import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from qarl_kernels import get_format
from qarl_nemo.files import FileError
from qarl_nemo.measure.compare.vllm_responses import import_vllm
from qarl_nemo.measure.speed import run, vllm_speed
from qarl_nemo.measure.speed.advice import recommend, speed_rows
from qarl_nemo.measure.speed.output import notes, recorded_rows, speed_table, write_speed
from qarl_nemo.measure.speed.run import FormatSpeed, measure_speed
from qarl_nemo.measure.speed.settings import RolloutSpeedSettings, SpeedJob, prepare_speed
from qarl_nemo.measure.speed.shapes import ModelShapes, read_shapes, shape_refusals
from qarl_nemo.measure.speed.vllm_speed import _randomize_one, _scale_nvfp4
from qarl_nemo.metrics.results import append_results
from support.whole_models import DENSE

MODEL = Path(__file__).parents[3] / "examples" / "models" / "qwen3-30b-a3b"
ENGINE = {
    "weights_gib": 57.0,
    "kv_cache_tokens": 700_000,
    "peak_gib": 120.0,
    "busiest_expert": 1.4,
    "version": "0.25.1",
}


@pytest.fixture(scope="module")
def model() -> ModelShapes:
    return read_shapes(MODEL)


def test_key_value_heads_are_repeated_on_more_ranks_than_there_are(model):
    # Four heads of 128 on eight ranks are 128 rows each, not 64, which fp8_block's kernel would not take.
    assert shape_refusals(model, get_format("fp8_block"), ["attention"], tensor_parallel_size=8) == []


def test_the_example_has_the_size_of_qwen3_30b_a3b(model):
    # 30.5 billion, says its model card
    assert sum(math.prod(shape) for _, shape in model.architecture.parameters()) == 30_532_122_624
    assert model.targets == ["experts", "attention"]


def test_everything_wrong_is_listed_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    wrong = RolloutSpeedSettings(
        model=tmp_path,
        formats=("w4a16", "w4a16", "nf4"),
        group_size=48,
        targets=("experts", "heads"),
        batch_sizes=(0,),
        new_tokens=0,
        tensor_parallel_size=16,
        gpu_memory_utilization=1.5,
    )
    with pytest.raises(ValueError, match="problem") as raised:
        prepare_speed(wrong)
    for text in (
        "new_tokens=0 must be at least 1",
        "batch_size=0 must be at least 1",
        "gpu_memory_utilization=1.5",
        "format w4a16 is named more than once",
        "unknown format 'nf4'",
        "unknown target 'heads'",
        "group_size=48 serves no format",
        "tensor_parallel_size=16",
        'model_type is "gpt2"; supported',
    ):
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("mlp",)}, "targets mlp match nothing of this model; it has experts, attention"),
        (
            {"prompt_tokens": 40_900},
            "40900 (--prompt-tokens) + 16 (before the timed steps) + 128 (--new-tokens) = 41044 tokens, and the "
            "model's contexts end at 40960",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide 32 heads"),
        ({"enable_expert_parallel": True}, "it needs tensor_parallel_size of at least 2"),
        ({"formats": ("fp8_block",), "group_size": 64}, "no integer format is measured"),
        ({"model": Path("nowhere")}, "nowhere: expected a model's config.json"),
        ({"model": Path("Qwen/Qwen3-0.6B")}, "hf download Qwen/Qwen3-0.6B"),
        ({"formats": ()}, "no format to measure"),
        ({"targets": ()}, "no target to measure; legal: experts, attention, mlp"),
        ({"formats": ("w2a16",)}, "format w2a16 is served in the storage of w4a16, at its speed: measure w4a16"),
        (
            {"formats": ("w5a16",)},
            "format w5a16 is not measured, vLLM serves dense layers of it only; legal: bf16, w4a16",
        ),
        ({"formats": ("int4",)}, "unknown format 'int4': did you mean 'w4a16'? legal: bf16, w4a16"),
        ({"formats": ("int3",)}, "unknown format 'int3': legal: bf16, w4a16"),
        ({"formats": ("w2a2",)}, "unknown format 'w2a2' (activations of fewer than 8 bits have no tensor-core path"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(options, message):
    with pytest.raises(ValueError, match="problem") as raised:
        prepare_speed(RolloutSpeedSettings(**{"model": MODEL} | options))
    assert message in str(raised.value)


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8"}])
def test_a_quantized_model_is_refused_and_one_that_says_null_is_none(tmp_path, quantization):
    config = DENSE | {"max_position_embeddings": 4096, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if quantization is None:
        assert read_shapes(tmp_path).max_position_embeddings == 4096
    else:
        with pytest.raises(ValueError, match="is of a quantized model; name the BF16 model"):
            read_shapes(tmp_path)


def test_a_dense_model_has_no_experts_to_place(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"max_position_embeddings": 4096}))
    options = {"targets": ("mlp",), "enable_expert_parallel": True, "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match="--enable-expert-parallel places experts, which this model does not have"):
        prepare_speed(RolloutSpeedSettings(tmp_path, **options))


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_an_earlier_measurement_that_is_damaged_is_named(content, model, tmp_path):
    job = SpeedJob(RolloutSpeedSettings(MODEL), model, (get_format("bf16"),), {}, "cuda", "1x NVIDIA H200", "0.25.1")
    (tmp_path / "bf16.json").write_text(content)
    with pytest.raises(FileError, match=r"bf16.json: expected an earlier measurement"):
        measure_speed(job, tmp_path, lambda *_: None)


def test_sizes_that_are_measured_later_do_not_make_the_engine_roomier(model, tmp_path, monkeypatch):
    asked = {512: {"kv_cache_tokens": 600_000, "peak_gib": 130.0}, 32: {"kv_cache_tokens": 700_000, "peak_gib": 110.0}}

    def events(request, *_):
        (size,) = json.loads(request.read_text())["batch_sizes"]
        yield {"event": "started", "methods": {}, **ENGINE, **asked[size]}
        yield {"event": "batch", "batch_size": size, "decode_tokens_s": [1.0], "prefill_tokens_s": [1.0]}

    monkeypatch.setattr(run, "_events", events)
    monkeypatch.setattr(run, "_method_problems", lambda *_: [])
    for sizes in ((512,), (512, 32)):
        settings = RolloutSpeedSettings(MODEL, batch_sizes=sizes)
        job = SpeedJob(settings, model, (get_format("bf16"),), {}, "cuda", "1x NVIDIA H200", "0.25.1")
        (measured,) = measure_speed(job, tmp_path, lambda *_: None)
    assert set(measured.batches) == {512, 32}
    assert (measured.engine["kv_cache_tokens"], measured.engine["peak_gib"]) == (600_000, 130.0)


def test_what_was_measured_with_other_settings_stays_under_a_number(model, tmp_path, monkeypatch):
    def events(_, log, *__):
        log.write_text("an engine's log")
        yield {"event": "started", "methods": {}, **ENGINE}
        yield {"event": "batch", "batch_size": 32, "decode_tokens_s": [1.0], "prefill_tokens_s": [1.0]}

    monkeypatch.setattr(run, "_events", events)
    monkeypatch.setattr(run, "_method_problems", lambda *_: [])
    for tokens in (128, 256, 256):
        settings = RolloutSpeedSettings(MODEL, batch_sizes=(32,), prompt_tokens=tokens)
        job = SpeedJob(settings, model, (get_format("bf16"),), {}, "cuda", "1x NVIDIA H200", "0.25.1")
        speeds = measure_speed(job, tmp_path, lambda *_: None)
        write_speed(tmp_path, job, speeds, speed_rows(speeds, (32,)))
    kinds = ("bf16", "bf16-1"), ("rollout_speed", "rollout_speed-1")
    for (new, old), suffix in zip(kinds, (".log", ".png"), strict=True):
        settings = [json.loads((tmp_path / f"{name}.json").read_text())["settings"] for name in (new, old)]
        assert [each["prompt_tokens"] for each in settings] == [256, 128]
        assert (tmp_path / f"{old}{suffix}").is_file()
    assert len(list(tmp_path.glob("*.json"))) == 4


def test_a_batch_whose_whole_blocks_the_cache_cannot_hold_is_not_measured(tmp_path, monkeypatch, capsys):
    cache = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=73, block_size=128))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=cache), collective_rpc=lambda _: [0])
    monkeypatch.setattr(vllm_speed, "start_engine", lambda _: (llm, 73 * 128))
    for name, value in {"draw_prompts": [], "_time_batch": {"decode_tokens_s": [1.0]}, "_expert_load": None}.items():
        monkeypatch.setattr(vllm_speed, name, lambda *_, value=value: value)
    # 400 tokens are 4 blocks: of 20 sequences 80, though their 8000 tokens are fewer than the cache's 9344.
    asked = {"batch_sizes": [18, 20], "prompt_tokens": 256, "settle_tokens": 16, "new_tokens": 128}
    (tmp_path / "request.json").write_text(json.dumps(asked))
    vllm_speed.main(str(tmp_path / "request.json"))
    events = [json.loads(line.removeprefix("QARL ")) for line in capsys.readouterr().out.splitlines() if line]
    reasons = {event["batch_size"]: event.get("reason") for event in events if event["event"] == "batch"}
    assert reasons[18] is None
    assert reasons[20] == "does not fit: the KV cache holds 9344 tokens, the batch needs 10240"


def test_the_block_that_vllm_keeps_empty_holds_no_tokens(monkeypatch):
    cache = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=8, block_size=128))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=cache), collective_rpc=lambda _: [0])
    fake = SimpleNamespace(LLM=lambda *_, **__: llm, __version__="0")
    monkeypatch.setattr(vllm_speed.os, "environ", dict(os.environ))
    monkeypatch.setattr(vllm_speed, "import_vllm", lambda _: fake)
    monkeypatch.setattr(vllm_speed, "_require_finite", lambda _: None)
    sizes = {"prompt_tokens": 100, "settle_tokens": 16, "new_tokens": 140}
    asked = {"device": "cpu", "model": "", "batch_sizes": [4], "seed": 0, "options": {}, **sizes}
    # Of four sequences of two blocks each vLLM runs three.
    assert vllm_speed.start_engine(asked) == (llm, 7 * 128)


def test_a_machine_without_gpu_hides_no_format_that_no_engine_would_serve(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = {"hidden_size": 96, "moe_intermediate_size": 80, "num_experts": 8, "num_experts_per_tok": 2}
    config = json.loads((MODEL / "config.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = RolloutSpeedSettings(tmp_path, ("nvfp4", "int8", "bf16"), repeats=1)
    with pytest.raises(ValueError, match=r"^1 problem\(s\) with --rollout:\n  no GPU") as raised:
        prepare_speed(settings)
    heading, *lines = str(raised.value).splitlines()[2:]
    assert heading == "  1 format(s) that no engine would serve elsewhere either:"
    assert [line.split(": ")[0] for line in lines] == ["    nvfp4"]
    assert "experts: gate_proj: N=80 is not a multiple of 64" in lines[0]
    assert "; down_proj: N=96 is not a multiple of 128" in lines[0]


@pytest.mark.parametrize(
    ("name", "group_size", "tensor_parallel_size", "reason"),
    [
        ("w4a16", 128, 2, None),
        # 768 / 4 = 192
        ("w4a16", 128, 4, "experts: down_proj: K=192 is not a multiple of group_size=128"),
        ("w4a16", 64, 4, None),
        ("w4a8", 128, 1, None),
        # 768 / 2 = 384
        ("w4a8", 128, 2, "N=384 is not a multiple of 256"),
        ("fp8_block", None, 2, None),
        ("fp8_block", None, 4, "K=192 is not a multiple of 128"),
        ("fp8_channel", None, 8, None),
    ],
)
def test_kernels_that_do_not_take_a_shard_are_known_before_an_engine_starts(
    model, name, group_size, tensor_parallel_size, reason
):
    fmt = get_format(name, group_size=group_size)
    found = shape_refusals(model, fmt, ["experts"], tensor_parallel_size=tensor_parallel_size)
    assert bool(found) == (reason is not None)
    assert reason is None or any(reason in text for text in found)
    # What the GPUs share is said once, however many shapes are wrong.
    assert [text.count("GPU") for text in found] == [int(tensor_parallel_size > 1)] * len(found)
    # whole experts on each GPU have the shapes of one GPU
    parallel = {"tensor_parallel_size": tensor_parallel_size, "enable_expert_parallel": True}
    assert shape_refusals(model, fmt, ["experts"], **parallel) == []


def speed(name: str, **batches: list[float]) -> FormatSpeed:
    measured = {
        int(size[1:]): {"decode_tokens_s": values, "prefill_tokens_s": [1000.0]} for size, values in batches.items()
    }
    return FormatSpeed(name, engine=dict(ENGINE), batches=measured)


SPEEDS = [
    speed("bf16", b8=[100.0, 90.0, 110.0], b64=[1000.0]),
    speed("w4a16", b8=[140.0, 139.0, 141.0], b64=[900.0]),
    speed("fp8_block", b8=[190.0, 180.0, 195.0], b64=[1.0]),
    FormatSpeed("w4a8", reason="not on this GPU"),
]
SPEEDS[2].batches[64] = {"reason": "does not fit"}


def test_rows_are_medians_over_the_baselines():
    rows = {(row.format_name, row.batch_size): row for row in speed_rows(SPEEDS, (8, 64))}
    assert rows["fp8_block", 8].decode_tokens_s == 190
    # distances 0, 10 and 5
    assert rows["fp8_block", 8].decode_noise == 5
    assert rows["fp8_block", 8].speedup == pytest.approx(1.9)
    assert rows["w4a16", 64].speedup == pytest.approx(0.9)
    assert rows["fp8_block", 64].reason == "does not fit"
    assert rows["w4a8", 8].reason == "not on this GPU"
    alone = speed_rows(SPEEDS[1:2], (8,))
    assert alone[0].speedup is None


def test_the_fastest_that_fits_is_recommended():
    eight, sixty_four = recommend(speed_rows(SPEEDS, (8, 64)))
    assert (eight["format"], eight["tied"]) == ("fp8_block", [])
    assert eight["reason"].startswith("fp8_block: the fastest of 3 whose memory fits, 1.90x bf16, 190 tokens/s")
    assert "next is w4a16 with 1.40x bf16" in eight["reason"]
    assert sixty_four["format"] == "bf16"


def test_formats_that_differ_by_no_more_than_twice_their_noises_are_tied():
    # medians 104 and 110, noises 2 and 1
    near = [speed("w4a16", b8=[102.0, 104.0, 106.0]), speed("fp8_block", b8=[109.0, 110.0, 111.0])]
    (advice,) = recommend(speed_rows(near, (8,)))
    assert (advice["format"], advice["tied"]) == ("fp8_block", ["w4a16"])
    assert "within noise of it: w4a16" in advice["reason"]
    # medians 103.9 and 110; one repeat that was held up, or sped up, decides nothing
    apart = [speed("w4a16", b8=[101.9, 103.9, 200.0]), speed("fp8_block", b8=[50.0, 110.0, 111.0])]
    assert recommend(speed_rows(apart, (8,)))[0]["tied"] == []


def test_nothing_is_recommended_where_nothing_was_served():
    (advice,) = recommend(speed_rows(SPEEDS[3:], (8,)))
    assert advice["format"] is None
    assert "no format was served" in advice["reason"]


def test_files_table_and_figures_hold_what_was_measured(model, tmp_path):
    settings = RolloutSpeedSettings(MODEL, batch_sizes=(8, 64))
    job = SpeedJob(settings, model, (), {}, "cuda", "1x NVIDIA H200", "0.25.1")
    rows = speed_rows(SPEEDS, settings.batch_sizes)
    written, figure = write_speed(tmp_path, job, SPEEDS, rows)
    content = json.loads(written.read_text())
    assert [advice["format"] for advice in content["recommendation"]] == ["fp8_block", "bf16"]
    assert len(content["rows"]) == 8
    assert figure.stat().st_size > 20_000
    assert speed_table(rows).row_count == 8
    assert notes(SPEEDS, rows) == [
        "w4a8 not measured at batch 8, 64: not on this GPU",
        "fp8_block not measured at batch 64: does not fit",
        "load of the busiest expert under dummy routers: 1.40x the mean",
    ]
    recorded = append_results(tmp_path / "results.json", recorded_rows(job, rows, "qarl doctor --rollout model"))
    figures = {row.name: row.value for row in recorded}
    assert figures["rollout_tokens_s_fp8_block_b8"] == 190
    assert figures["rollout_speedup_w4a16_b64"] == pytest.approx(0.9)
    assert figures["rollout_weights_gib_bf16"] == 57
    assert figures["rollout_noise_max"] == pytest.approx(0.1)
    assert not any("w4a8" in name for name in figures)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("w13_weight_packed", torch.int32), ("w13_weight", torch.int8), ("w2_weight", torch.float8_e4m3fn)],
)
def test_measured_weights_have_many_values(name, dtype):
    weight = torch.zeros(64, 64).to(dtype)
    _randomize_one(f"model.layers.0.mlp.experts.{name}", weight)
    assert len(weight.float().unique()) > 50


def test_measured_nvfp4_layers_have_scales_of_weights():
    """The kernel's scale of a weight is byte * global scale: dummy ones are near zero and infinite."""
    experts = torch.nn.Module()
    for name in ("w13_weight_scale", "w2_weight_scale"):
        scale = torch.zeros(2, 4).to(torch.float8_e4m3fn)
        experts.register_parameter(name, torch.nn.Parameter(scale, requires_grad=False))
    experts.w13_weight_global_scale = torch.nn.Parameter(torch.zeros(2, 2))
    experts.w13_weight_scale_2 = torch.full((2,), torch.inf)
    other = torch.nn.Module()
    other.weight_scale = torch.nn.Parameter(torch.zeros(3))
    with torch.inference_mode():
        _scale_nvfp4(experts)
        _scale_nvfp4(other)
    # Five bits of exponent with a bias of 15, three of fraction, and 2^7 that Marlin takes out: 176 = 22 << 3 is 1.
    for name in ("w13_weight_scale", "w2_weight_scale"):
        byte = getattr(experts, name).view(torch.uint8).unique().item()
        assert 2.0 ** ((byte >> 3) - 15) * (1 + (byte & 7) / 8) / 2**7 == 1.0
    # Marlin's form is 2^119 times the global scale.
    assert (experts.w13_weight_scale_2 / 2.0**119).tolist() == [2.0**-7] * 2
    assert not other.weight_scale.any()


def test_a_vllm_that_was_built_for_another_device_is_refused(monkeypatch):
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.__version__, platforms.current_platform = "0.25.1", SimpleNamespace(device_type="cuda")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert import_vllm("cuda") is vllm
    platforms.current_platform = SimpleNamespace(device_type="cpu")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.25\.1 is a cpu build, not cuda"):
        import_vllm("cuda")
