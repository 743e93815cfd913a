"""`${...}` in a comparison is filled in once for all of its runs: it must not mean what an arm or a seed changes."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Keys = tuple[str, ...]

# Backslashes make text of it; `oc.select` looks up a key, other resolvers do not.
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{(?:oc\.select:)?([^${}:,]*)(?=[},$])")
# Follow from the comparison itself, whatever a file says.
_NOT_OF_A_RUN = ("seed", "run_dir", "run")


def stale_references(values: Mapping[str, Any]) -> list[str]:
    """Say which references of a comparison would be filled in with a value that some of its runs do not have.

    Args:
        values: the merged config, with `${...}` as they are written.

    Returns:
        A sentence each, with what to do; none without a `compare:` block.
    """
    compare = values.get("compare")
    arms = compare.get("arms") if isinstance(compare, Mapping) else None
    if not isinstance(compare, Mapping) or not isinstance(arms, Mapping):
        return []
    rest = {key: value for key, value in values.items() if key not in (*_NOT_OF_A_RUN, "compare")}
    one_seed = compare.get("seeds") == [values.get("seed", 0)]
    problems = []
    for place, target in _references(rest):
        if not one_seed and target == ("seed",):
            problems.append(_of_seed(".".join(place), values))
        for name, arm in arms.items():
            if _sets(arm, target) and not _sets(arm, place):
                problems.append(_of_arm(".".join(place), ".".join(target), name))
    for name, arm in arms.items():
        above = ("compare", "arms", str(name))
        for place, target in _references(arm, above):
            key = f"arm {name!r}: {'.'.join(place[len(above) :])}"
            if not one_seed and target == ("seed",):
                problems.append(_of_seed(key, values))
            elif _sets(arm, target):
                problems.append(_of_arm(key, ".".join(target), name))
    return problems


def _of_arm(key: str, target: str, arm: Any) -> str:
    filled = "but is filled in before arms are: set a value in that arm"
    return f"{key} refers to {target}, which arm {arm!r} sets, {filled}"


def _of_seed(key: str, values: Mapping[str, Any]) -> str:
    filled = values.get("seed", 0)
    return f"{key} refers to seed, but is filled in once, with {filled}, for all of compare.seeds: set a value"


def _references(value: Any, place: Keys = ()) -> Iterator[tuple[Keys, Keys]]:
    """Yield the place of each reference, and the key that it looks up."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _references(below, (*place, str(key)))
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _references(below, (*place, str(number)))
    elif isinstance(value, str):
        for text in _REFERENCE.findall(value):
            dots = len(text) - len(text.lstrip("."))
            above = place[: len(place) - dots] if dots else ()
            yield place, (*above, *(part for part in re.split(r"[.\[\]]", text) if part))


def _sets(arm: Any, keys: Keys) -> bool:
    """Tell whether an arm sets a key, something in its block, or a block around it."""
    if not isinstance(arm, Mapping) or not keys or arm.get("_override_") is True:
        return True
    return keys[0] in arm and _sets(arm[keys[0]], keys[1:])
