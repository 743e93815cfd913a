"""The versions that a row says it was measured with."""

import sys
from types import ModuleType

from qarl_nemo.metrics.machine import facts, went_on


def test_versions_are_those_of_what_is_installed_or_imported(monkeypatch):
    # As Megatron-core is where a path leads to its sources.
    module = ModuleType("some.sources")
    module.__version__ = "0.20.0"
    monkeypatch.setitem(sys.modules, "some.sources", module)
    versions = facts("cpu", packages=["numpy", "some-sources", "not-here"])["versions"]
    assert versions["some-sources"] == "0.20.0"
    assert {"python", "torch", "transformers", "numpy"} < set(versions)
    assert "not-here" not in versions


def test_a_resumed_run_ran_on_what_it_began_with_and_on_what_it_went_on_with():
    h100 = {"hardware": "1x NVIDIA H100", "versions": {"torch": "2.11.0", "vllm": "0.25.1"}}
    h200 = {"hardware": "1x NVIDIA H200", "versions": {"torch": "2.13.0", "vllm": "0.25.1"}}
    assert went_on(h100, h100) == h100
    both = {
        "hardware": "1x NVIDIA H100, then 1x NVIDIA H200",
        "versions": {"torch": "2.11.0, then 2.13.0", "vllm": "0.25.1"},
    }
    assert went_on(h100, h200) == both
    assert went_on(both, h200) == both
    assert went_on(both, h100)["hardware"] == "1x NVIDIA H100, then 1x NVIDIA H200, then 1x NVIDIA H100"
