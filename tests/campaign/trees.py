"""Damage that knows JSON, YAML and JSONL: values of other types, missing, renamed and doubled keys, depth, size."""

import json
import random
from collections.abc import Iterator
from typing import Any

import yaml
from edits import Content, edit_bytes

_DEEP, _DOUBLE = "@deep@", "@double@"
_DEPTH = 5000
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "0",
    "../../etc/passwd",
    "/dev/zero",
    "\x00",
    "\ud800",
    "${run_dir}",
    "a" * 100_000,
    [],
    {},
    [None],
    [["a", 1]],
    {"a": {"b": []}},
    _DEEP,
)


def edit_tree(rng: random.Random, tree: Any) -> tuple[str, Any]:
    """Damage one place of nested mappings and lists.

    Args:
        rng: source of randomness.
        tree: the value; it is not changed.

    Returns:
        What was done, and a new value.
    """
    tree = json.loads(json.dumps(tree))
    places = list(places_in(tree))
    if not places or rng.random() < 0.04:
        value = rng.choice(VALUES)
        return f"everything is {_short(value)}", value
    path, holder, key = rng.choice(places)
    name = ".".join(map(str, path))
    action = rng.choices(("replace", "delete", "rename", "add", "scale", "wrap", "double"), (8, 3, 2, 2, 3, 1, 1))[0]
    old = holder[key]
    if action == "delete":
        del holder[key]
        return f"without {name}", tree
    if action in ("rename", "double") and isinstance(holder, dict):
        holder[f"{key}{_DOUBLE if action == 'double' else 'x'}"] = old if action == "double" else holder.pop(key)
        return f"{name} {action}d", tree
    if action == "add" and isinstance(holder, dict):
        holder["added"] = rng.choice(VALUES)
        return f"beside {name}: added = {_short(holder['added'])}", tree
    if action == "scale" and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = rng.choice((old + 1, old - 1, -old, old * 2, old // 2 or 3, old * 1000))
    elif action == "wrap":
        holder[key] = [old]
    else:
        holder[key] = rng.choice(VALUES)
    return f"{name}: {_short(old)} -> {_short(holder[key])}", tree


def edit_json(rng: random.Random, data: bytes) -> Content:
    """Damage a JSON file as `edit_tree` does."""
    what, tree = edit_tree(rng, json.loads(data))
    return what, _json_text(tree).encode("utf-8", "surrogatepass")


def edit_jsonl(rng: random.Random, data: bytes) -> Content:
    """Damage one line of a JSONL file, or its lines."""
    lines = data.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    action = rng.choices(("tree", "bytes", "drop", "twice", "swap", "blank", "no end"), (10, 3, 1, 1, 1, 1, 1))[0]
    where = f"line {number + 1} of {len(lines)}"
    if action == "tree":
        what, tree = edit_tree(rng, json.loads(lines[number]))
        lines[number] = _json_text(tree).encode("utf-8", "surrogatepass") + b"\n"
        return f"{where}: {what}", b"".join(lines)
    if action == "bytes":
        what, line = edit_bytes(rng, lines[number])
        lines[number] = line
        return f"{where}: {what}", b"".join(lines)
    if action == "swap":
        lines[number], lines[0] = lines[0], lines[number]
    elif action == "no end":
        lines[number] = lines[number].rstrip(b"\n")
    else:
        lines[number : number + 1] = {"drop": [], "twice": [lines[number]] * 2, "blank": [b"\n", lines[number]]}[action]
    return f"{where}: {action}", b"".join(lines)


_YAML_TEXTS = (
    "- a\n- b\n",
    "a: b: c\n",
    "\tkey: 1\n",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "!!python/object/apply:os.getcwd []\n",
    "seed: !!python/name:os.getcwd\n",
    "defaults: run.yaml\n",
    "defaults: [nothing.yaml]\n",
    "defaults: {a: 1}\n",
    "seed: ${nothing}\n",
    "seed: ${seed}\n",
    "seed: ${oc.env:HOME}\n",
    "? [1, 2]\n: 3\n",
    "seed: 2024-01-01\n",
    "1: 2\n",
    "null: 3\n",
    "seed: 1\nseed: 2\n",
    "---\na: 1\n---\nb: 2\n",
    "_override_: true\n",
    "%YAML 9.9\n---\na: 1\n",
)


def edit_yaml(rng: random.Random, data: bytes) -> Content:
    """Damage a YAML file: its tree, or lines that only YAML knows."""
    if rng.random() < 0.2:
        text = rng.choice(_YAML_TEXTS)
        before = rng.random() < 0.5
        return (
            f"{'begins' if before else 'ends'} with {text!r}",
            text.encode() + data if before else data + text.encode(),
        )
    what, tree = edit_tree(rng, yaml.safe_load(data))
    text = yaml.dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=False)
    text = text.replace(f"'{_DEEP}'", "[" * 200 + "]" * 200).replace(_DOUBLE, "")
    return what, text.encode("utf-8", "surrogatepass")


def draw_override(rng: random.Random, tree: dict[str, Any]) -> str:
    """Draw an `a.b=c` that means something else, or nothing.

    Args:
        rng: source of randomness.
        tree: the config it overrides.

    Returns:
        One argument.
    """
    if rng.random() < 0.15:
        return rng.choice(
            ("seed", "=1", ".=1", "a..b=1", "seed=[", "seed={a", "-seed=1", "seed=!!python/none", "a=b=c")
        )
    path, _, _ = rng.choice(list(places_in(tree)))
    key = ".".join(map(str, path)) + rng.choice(("", "", "", "x", ".y"))
    value = rng.choice(VALUES)
    text = "[" * 200 if value == _DEEP else json.dumps(value) if rng.random() < 0.5 else str(value)
    return f"{key}={text}".replace("\x00", "\\0").encode("utf-8", "replace").decode()[:2000]


def places_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield path, holder and key of everything that dictionaries and lists hold, at any depth."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key), tree, key
        yield from places_in(value, (*path, key))


def _json_text(tree: Any) -> str:
    return json.dumps(tree).replace(f'"{_DEEP}"', "[" * _DEPTH + "]" * _DEPTH).replace(_DOUBLE, "")


def _short(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, int | str) else repr(value)[:60]
