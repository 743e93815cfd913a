"""The names under which `qarl compare --record` keeps its figures."""

from pathlib import Path

import pytest

from qarl_nemo.measure.compare.output import legend
from qarl_nemo.measure.compare.record import comparison_rows
from qarl_nemo.measure.compare.run import Comparison
from qarl_nemo.measure.compare.settings import CompareSettings
from qarl_nemo.metrics.results import Figure


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"nested_in": "w8a16"}, "_in_w8a16"),
        ({"own_width": True, "targets": ("mlp",)}, "_mlp_own_width"),
        ({"attention": "engine", "engine": "vllm", "nested_in": "w8a16"}, "_in_w8a16_engine_attention"),
    ],
)
def test_what_was_asked_for_is_told_apart_in_the_names_of_rows(options, end):
    """A grid that is nested is not the format's own, whose rows stay."""
    asked = CompareSettings(Path("model"), **options)
    (row,) = comparison_rows(asked, "packed", [Figure("gap_aligned_w4a16", 0.1, "nats", "<=")], "cpu", "qarl compare")
    assert row["name"] == f"gap_aligned_w4a16{end}"


def test_the_legend_names_the_unit_and_the_arms_that_stand_in_the_table():
    said = list(legend(Comparison("packed", {}, [{"arm": "aligned"}, {"arm": "engine"}], [])))
    assert any("nats a token" in line for line in said)
    assert said[1].endswith("x own: over |gap| of the arm `attention`.")
    assert [line.split(":")[0] for line in said] == [said[0], "x floor", "engine"]
