"""A shard is made again when any file that decides it has changed, also one that holds none of its own weights."""

import json

import pytest
from safetensors.torch import save_file

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_checkpoint, quantize_checkpoint
from qarl_nemo.checkpoints.merge import Training, merged_checkpoint
from support.files import contents
from support.whole_models import DENSE, tensors_of


def in_two_files(folder, tensors, second):
    """Write a checkpoint whose second file holds the projections named; only that one is written again."""
    weight_map = {name: f"model-{1 + any(one in name for one in second)}.safetensors" for name in tensors}
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file in sorted(set(weight_map.values())):
        if file == "model-2.safetensors" or not (folder / file).exists():
            held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
            save_file(held, folder / file)


@pytest.mark.parametrize(
    ("fmt", "broken", "options"),
    [("nvfp4", "up_proj", {}), ("bf16", "down_proj", {"split_channels": 0.25})],
    ids=["a shared scale", "the order of split channels"],
)
def test_a_weight_in_another_file_that_was_repaired(fmt, broken, options, make_source, tmp_path):
    tensors, second = tensors_of(DENSE), ("up_proj", "down_proj")
    folder = make_source(tensors, DENSE)
    name = next(name for name in tensors if f"{broken}.weight" in name)
    half = tensors[name].clone()
    half[: len(half) // 2] = float("nan")
    in_two_files(folder, tensors | {name: half}, second)

    def run(destination):
        return quantize_checkpoint(folder, destination, get_format(fmt), ["mlp"], max_shard_bytes=10_000, **options)

    with pytest.raises(ValueError, match="repair the source and run again"):
        run(tmp_path / "out")
    in_two_files(folder, tensors, second)
    assert run(tmp_path / "out").num_resumed_shards > 1
    run(tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_merged_weight_is_made_from_the_files_of_all_that_share_its_scale(make_source):
    tensors = tensors_of(DENSE)
    folder = make_source(tensors, DENSE)
    in_two_files(folder, tensors, ("up_proj",))
    for fmt, both in (("nvfp4", True), ("w4a16", False)):
        training = Training(get_format(fmt), ("mlp",), {}, 1.0, {}, ())
        infos = {info.name: info for info in merged_checkpoint(open_checkpoint(folder), training).tensors}
        assert (len(infos["model.layers.0.mlp.gate_proj.weight"].files) == 2) == both
        assert len(infos["model.layers.0.self_attn.o_proj.weight"].files) == 1
