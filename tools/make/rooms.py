"""The rooms of the house as the code has them: their floors, what they are for, and what they import."""

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
KERNELS, FORMATS = "qarl_kernels", "qarl_formats"


def read_floors() -> list[list[str]]:
    """Return the rooms of each floor, highest first, from the import contract called `floors`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (floors,) = [contract["layers"] for contract in contracts if contract["id"] == "floors"]
    return [[room.strip() for room in floor.split("|")] for floor in floors if floor != "__main__"]


def read_imports() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return what each room imports: the other rooms, and the packages from outside."""
    graph = grimp.build_graph("qarl_nemo", KERNELS, include_external_packages=True, cache_dir=None)
    rooms, packages = defaultdict(set), defaultdict(set)
    for module in graph.modules:
        if (room := _room(module)) is not None:
            for target in graph.find_modules_directly_imported_by(module):
                if (other := _room(target)) is None:
                    packages[room].add(target)
                elif other != room:
                    rooms[room].add(other)
    return rooms, packages


def without_implied(imports: dict[str, set[str]], rooms: set[str]) -> list[tuple[str, str]]:
    """Return the imports between `rooms` that no longer way implies, sorted."""
    direct = {room: imports[room] & rooms for room in rooms}

    def reach(room: str) -> set[str]:
        return direct[room].union(*(reach(target) for target in direct[room]))

    return sorted(
        (room, target)
        for room in rooms
        for target in direct[room]
        if not any(target in reach(other) for other in direct[room] - {target})
    )


def purpose(room: str) -> str:
    """Return the first sentence of a room's docstring, or its part before a semicolon."""
    folder = ROOT / ("kernels" if room == KERNELS else "qarl_nemo") / room
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(";")[0].rstrip(".")


def _room(module: str) -> str | None:
    package, _, name = module.partition(".")
    if package == KERNELS:
        return KERNELS
    return name.partition(".")[0] or None if package == "qarl_nemo" else None
