"""The versions that a row says it was measured with."""

import sys
from types import ModuleType

from qarl_nemo.metrics.machine import facts


def test_versions_are_those_of_what_is_installed_or_imported(monkeypatch):
    # As Megatron-core is where a path leads to its sources.
    module = ModuleType("some.sources")
    module.__version__ = "0.20.0"
    monkeypatch.setitem(sys.modules, "some.sources", module)
    versions = facts("cpu", packages=["numpy", "some-sources", "not-here"])["versions"]
    assert versions["some-sources"] == "0.20.0"
    assert {"python", "torch", "transformers", "numpy"} < set(versions)
    assert "not-here" not in versions
