"""The Megatron learner: equal to the embedded engine's on every layout, published from its shards."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from asserts import assert_bitwise_equal

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install megatron-core==0.16.1"
    ),
    pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="needs four GPUs, or none"),
]

RANKS = 4
LAST_EXPERTS = "model.layers.1.mlp.experts"
SUMS_DIFFER = 1e-5  # relative, in FP32: other orders of the same sums


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every layout gave on every rank, from one run of four processes."""
    folder = tmp_path_factory.mktemp("megatron")
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Transformer-Engine multiplies FP32 as TF32, if it may.
    settings = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "run_megatron.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(folder / f"rank{rank}.pt", map_location="cpu", weights_only=False) for rank in range(RANKS)]
    return ranks[0].pop("reference"), ranks


def layouts(results):
    """Each layout's name, what the embedded engine gave in its mode, and every rank's results."""
    reference, ranks = results
    for name, result in ranks[0].items():
        if isinstance(result, dict) and "published" in result:
            kind = next(key for key in ("high_precision", "attention", "") if name.startswith(key))
            yield name, reference[kind], [rank[name] for rank in ranks]


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# One test: its worker alone starts the ranks.
def test_megatron_learner(results):
    names = [name for name, *_ in layouts(results)]
    assert len(names) == 16
    for name, reference, ranks in layouts(results):
        check_training(name, reference, ranks)
        check_publishing(name, reference, ranks)
    check_modes_differ(results)
    for rank in results[1]:
        check_layers(rank["layers"])
        held, after_release = rank["dropped_caches"]
        assert (held, after_release) == (2, 0)
        aligned, plain = rank["checkpoint_keys"]
        assert aligned == plain


def check_training(name, reference, ranks):
    """Loss and gradients of a layout are the embedded engine's, but for the order of sums."""
    seen = set()
    for rank in ranks:
        assert rank["loss"] == pytest.approx(reference["loss"], rel=SUMS_DIFFER), name
        if rank["grads"] is None:
            return
        for key, grad in rank["grads"].items():
            seen.add(key)
            # The router's gradient comes through fc2's backward weight here, through its forward weight there.
            if name == "high_precision" and not key.startswith(LAST_EXPERTS):
                continue
            assert relative_error(grad, reference["grads"][key]) < SUMS_DIFFER, f"{name}: {key}"
    assert seen == {key for key in reference["grads"] if ".layers." in key}, name


def check_publishing(name, reference, ranks):
    """What shards publish is, byte for byte, what the whole model publishes; and its masters' current form."""
    for rank in ranks:
        assert set(rank["published"]) == set(reference["published"]), name
        for key, tensor in reference["published"].items():
            assert_bitwise_equal(rank["published"][key], tensor)
        for key, shard in rank["shards"].items():
            first = rank["ep_rank"] * len(shard)
            assert_bitwise_equal(shard, reference["published"][key][first : first + len(shard)])
        for key, tensor in rank["requantized"].items():
            assert_bitwise_equal(rank["stepped"][key], tensor)
            assert not torch.equal(rank["stepped"][key], rank["published"][key]), f"{name}: {key} is stale"


def check_modes_differ(results):
    """The comparison of gradients would see the wrong backward weight."""
    reference, _ = results
    key = f"{LAST_EXPERTS}.gate_up_proj"
    one, other = (reference[kind]["grads"][key] for kind in ("", "high_precision"))
    assert relative_error(one, other) > 100 * SUMS_DIFFER


def check_layers(cases):
    """In every format a layer gives the embedded engine's bits, wherever its experts live."""
    assert len(cases) == 7 * 2 * 3
    for key, case in cases.items():
        actual, expected = case["actual"], dict(case["expected"])
        assert torch.equal(actual["out"], expected["out"]), key
        bound = SUMS_DIFFER if "float32" in key else 0.02
        for part in actual.keys() - {"out", "experts"}:
            whole = expected[part][actual["experts"]] if part in ("gate_up", "down") else expected[part]
            assert relative_error(actual[part], whole) < bound, f"{key}: {part}"
            if part in ("gate_up", "down"):
                unused = [expert for expert, grad in enumerate(whole) if not grad.any()]
                assert not actual[part][unused].any(), f"{key}: an expert without tokens"
