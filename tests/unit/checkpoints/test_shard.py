import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qarl_nemo.checkpoints.shard import save_shard

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
]


def test_safetensors_reads_every_dtype_and_shape_as_it_was(tmp_path):
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "na\N{DIAERESIS}me": torch.ones(1),
    }
    save_shard(tensors, tmp_path / "a.safetensors", {"format": "pt", "b": "2"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with safe_open(tmp_path / "a.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt", "b": "2"}


def test_the_data_is_what_safetensors_itself_would_write(tmp_path):
    tensors = {name: torch.randn(3, 7).to(dtype) for name, dtype in (("b", torch.bfloat16), ("a", torch.float32))}
    save_shard(dict(reversed(tensors.items())), tmp_path / "ours", {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
