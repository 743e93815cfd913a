"""The ratchet of type errors: a room may have fewer than recorded, never more."""

import runpy
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "check_types.py"


def test_a_room_with_more_errors_than_recorded_stands_out_and_so_does_one_with_fewer():
    differ = runpy.run_path(str(TOOL))["rooms_that_differ"]
    recorded = {"qarl_nemo/train": 3, "qarl_nemo/measure": 2, "tools/bench": 1}
    found = {"qarl_nemo/train": 4, "qarl_nemo/measure": 2, "qarl_nemo/refit": 1}
    assert differ(found, recorded) == (["qarl_nemo/refit", "qarl_nemo/train"], ["tools/bench"])
