"""Check types, and compare each room's errors with tools/type_errors.json; a room not listed there may have none.

python tools/check_types.py            # fails where there are more errors than recorded, and shows them
python tools/check_types.py --record   # writes the counts down; they only fall
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_name("type_errors.json")


def find_errors() -> list[dict[str, Any]]:
    """Return what pyrefly finds: path, line, name and description of each error."""
    command = [sys.executable, "-m", "pyrefly", "check", "--output-format", "json"]
    options = ["--python-interpreter-path", sys.executable]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)["errors"]


def room_of(path: str) -> str:
    """Return the folder that errors are counted by, e.g. `qarl_nemo/refit`."""
    return "/".join(Path(path).parts[:2])


def rooms_that_differ(found: Mapping[str, int], recorded: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the rooms with more errors than recorded, and those with fewer."""
    more = [room for room, count in found.items() if count > recorded.get(room, 0)]
    return sorted(more), sorted(room for room, count in recorded.items() if found.get(room, 0) < count)


def main() -> int:
    """Compare, or record; return 1 if a room has more errors than recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write lower counts down")
    options = parser.parse_args()
    errors = find_errors()
    recorded, found = json.loads(RECORDED.read_text()), Counter(room_of(error["path"]) for error in errors)
    worse, fallen = rooms_that_differ(found, recorded)
    for error in errors:
        if room_of(error["path"]) in worse:
            print(f"{error['path']}:{error['line']}: {error['concise_description']} [{error['name']}]")
    for room in worse:
        print(f"{room}: {found[room]} type errors, {recorded.get(room, 0)} are recorded")
    if options.record:
        lower = {room: min(count, found[room]) for room, count in recorded.items() if found[room]}
        RECORDED.write_text(json.dumps(lower, indent=1) + "\n")
    elif fallen:
        print(f"fewer type errors than recorded in {', '.join(fallen)}: `make format` writes that down")
    return int(bool(worse) and not options.record)


if __name__ == "__main__":
    sys.exit(main())
