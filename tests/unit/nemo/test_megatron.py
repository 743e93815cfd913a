"""The Megatron learner: equal to the embedded engine's on every layout, published from its shards.

Set QARL_MEGATRON_RESULTS to a file to keep the figures as rows of docs/results.
"""

import datetime
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from asserts import assert_bitwise_equal

from qarl_nemo.metrics.machine import hardware, versions
from qarl_nemo.metrics.results import append_results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="needs megatron-core: pip install megatron-core==0.16.1"
    ),
    pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="needs four GPUs, or none"),
]

RANKS = 4
LAST_EXPERTS = "model.layers.1.mlp.experts"
SUMS_DIFFER = 1e-5  # relative, in FP32: other orders of the same sums
COMMAND = "QARL_MEGATRON_RESULTS=docs/results/megatron.json python -m pytest tests/unit/nemo/test_megatron.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the embedded engine gave, and what every layout gave on every rank of one run of four processes."""
    folder = tmp_path_factory.mktemp("megatron")
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Transformer-Engine multiplies FP32 as TF32, if it may.
    settings = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(here / "run_megatron.py"), str(folder)],
        env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(folder / f"rank{rank}.pt", map_location="cpu", weights_only=False) for rank in range(RANKS)]
    return ranks[0]["reference"], ranks


def layouts(results):
    """Each layout's name, what the embedded engine gave, and every rank's results."""
    references, ranks = results
    for name, reference in references.items():
        yield name, reference, [rank["layouts"][name] for rank in ranks]


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# One test: of several, each worker that gets one would start its own ranks.
def test_megatron_learner(results):
    errors = {name: training_error(name, reference, ranks) for name, reference, ranks in layouts(results)}
    assert len(errors) == 17
    differing = {name: differing_tensors(reference, ranks) for name, reference, ranks in layouts(results)}
    keep_figures(results, errors, differing)
    assert {name: error for name, error in errors.items() if error >= SUMS_DIFFER} == {}
    assert {name: keys for name, keys in differing.items() if keys} == {}
    for name, _, ranks in layouts(results):
        check_republishing(name, ranks)
    check_modes_differ(results)
    for rank in results[1]:
        check_layers(rank["layers"])
        check_routes(rank["routes"])
        assert rank["dropped_caches"] == (2, 0)
        assert "rank 2: " in rank["refused"]
        assert "model.layers.1.mlp.experts.down_proj" in rank["refused"]
        aligned, plain = rank["checkpoint_keys"]
        assert aligned == plain


def training_error(name, reference, ranks):
    """The largest relative difference from the embedded engine, over the loss and each parameter's gradient."""
    largest = max(abs(rank["loss"] / reference["loss"] - 1) for rank in ranks)
    if any(rank["grads"] is None for rank in ranks):
        return largest
    grads = {key: grad for rank in ranks for key, grad in rank["grads"].items()}
    assert set(grads) == {key for key in reference["grads"] if ".layers." in key}, name
    for key, grad in grads.items():
        # Otherwise the router's gradient comes through fc2's backward weight here, through its forward weight there.
        if name != "high_precision" or key.startswith(LAST_EXPERTS):
            largest = max(largest, relative_error(grad, reference["grads"][key]))
    return largest


def differing_tensors(reference, ranks):
    """Published tensors that are not, byte for byte, what the whole model publishes."""
    differing = set()
    for rank in ranks:
        for key in set(rank["published"]) ^ set(reference["published"]):
            differing.add(f"{key} (missing or unexpected)")
        for key, tensor in rank["published"].items():
            if key in reference["published"] and not same_bytes(tensor, reference["published"][key]):
                differing.add(key)
    return differing


def same_bytes(actual, expected):
    try:
        assert_bitwise_equal(actual, expected)
    except AssertionError:
        return False
    return True


def check_republishing(name, ranks):
    """Shards without gathering are parts of the whole; after a step the masters' new form is published."""
    for rank in ranks:
        for key, shard in rank["shards"].items():
            first = rank["ep_rank"] * len(shard)
            assert_bitwise_equal(shard, rank["published"][key][first : first + len(shard)])
        for key, tensor in rank["requantized"].items():
            assert_bitwise_equal(rank["stepped"][key], tensor)
            assert not torch.equal(rank["stepped"][key], rank["published"][key]), f"{name}: {key} is stale"


def check_modes_differ(results):
    """The comparison of gradients would see the wrong backward weight."""
    references, _ = results
    key = f"{LAST_EXPERTS}.gate_up_proj"
    one, other = (references[kind]["grads"][key] for kind in ("ep2", "high_precision"))
    assert relative_error(one, other) > 100 * SUMS_DIFFER


def check_layers(cases):
    """In every format a layer gives the embedded engine's bits, wherever its experts live."""
    assert len(cases) == 7 * 2 * 3
    for key, case in cases.items():
        actual, expected = case["actual"], case["expected"]
        assert torch.equal(actual["out"], expected["out"]), key
        bound = SUMS_DIFFER if "float32" in key else 0.02
        for part in actual.keys() - {"out", "experts"}:
            whole = expected[part][actual["experts"]] if part in ("gate_up", "down") else expected[part]
            assert relative_error(actual[part], whole) < bound, f"{key}: {part}"


def check_routes(routes):
    """Recorded choices are the embedded engine's, and replayed ones give its output, in recomputation too."""
    assert routes["recorded"]
    assert torch.equal(routes["replayed"], routes["expected"])
    assert torch.equal(routes["again"], routes["expected"])
    assert not torch.equal(routes["own"], routes["expected"])


def keep_figures(results, errors, differing):
    """With QARL_MEGATRON_RESULTS, what was measured becomes rows of docs/results."""
    path = os.environ.get("QARL_MEGATRON_RESULTS")
    if not path:
        return
    facts = {
        "unit": "",
        "hardware": hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": versions() | results[1][0]["versions"],
        "command": COMMAND,
        "date": datetime.date.today().isoformat(),
    }
    rows = [
        {"name": f"packed_bit_equal_{name}", "value": float(not keys), "op": "==", "goal": 1.0, **facts}
        for name, keys in differing.items()
    ]
    rows += [
        {"name": f"training_error_{name}", "value": float(f"{error:.2g}"), "op": "<", "goal": SUMS_DIFFER, **facts}
        for name, error in errors.items()
    ]
    append_results(Path(path), rows)
