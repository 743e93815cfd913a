"""The ratchet of type errors: a room may have fewer than recorded, never more."""

import json
import runpy
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "check_types.py"


def test_a_room_with_more_errors_than_recorded_stands_out_and_so_does_one_with_fewer():
    differ = runpy.run_path(str(TOOL))["rooms_that_differ"]
    recorded = {"qarl_nemo/train": 3, "qarl_nemo/measure": 2, "tools/bench": 1}
    found = {"qarl_nemo/train": 4, "qarl_nemo/measure": 2, "qarl_nemo/refit": 1}
    assert differ(found, recorded) == (["qarl_nemo/refit", "qarl_nemo/train"], ["tools/bench"])


def test_rooms_that_are_checked_in_full_have_nothing_recorded():
    recorded = json.loads(TOOL.with_name("type_errors.json").read_text())
    assert not {f"qarl_nemo/{room}" for room in ("config", "layers", "losses", "nemo_rl", "refit")} & set(recorded)
