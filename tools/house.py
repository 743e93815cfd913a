"""Measure the house: types, imports, lengths, how many files name a format; the rows of docs/results/house.json.

    make house                                                       # prints the table
    python tools/house.py --fast-s 55 --test-s 340 --record docs/results/house.json

Seconds of `make fast` and `make test` are timed by hand, on two cores with nothing else running.
"""

import argparse
import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median

import grimp
from check_types import find_errors, room_of
from make.format_files import format_files

from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, append_results, result_rows

ROOT = Path(__file__).parents[1]
# The commit that the goals were set against.
BEFORE = "4a952fc"
PRODUCT = ("qarl_nemo", "kernels", "tools", "examples")
TYPED = ("config", "layers", "losses", "nemo_rl", "refit")


def function_lengths(text: str) -> Iterator[int]:
    """Yield how many lines each function of a module has."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def two_way_pairs() -> list[tuple[str, str]]:
    """Return the folders of qarl_nemo that import each other both ways and are not one within the other."""
    graph = grimp.build_graph("qarl_nemo")
    modules = graph.modules
    folders = {name: name if graph.find_children(name) else name.rpartition(".")[0] for name in modules}
    imports = {
        (folders[name], folders[target]) for name in modules for target in graph.find_modules_directly_imported_by(name)
    }
    return sorted(
        (one, other)
        for one, other in imports
        if one < other and not other.startswith(f"{one}.") and (other, one) in imports
    )


def measure() -> list[Figure]:
    """Return everything that can be counted."""
    texts = [path.read_text(encoding="utf-8") for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    lines = [len(text.splitlines()) for text in texts]
    rooms = [room_of(error["path"]) for error in find_errors()]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pairs = two_way_pairs()
    for pair in pairs:
        print("import each other:", *pair)
    return [
        Figure(
            "type_errors_checked", sum(room in {f"qarl_nemo/{name}" for name in TYPED} for room in rooms), "", "<=", 0
        ),
        Figure("type_errors", len(rooms), "", "<="),
        Figure("format_files_before", len(format_files(BEFORE)), "files", "<="),
        Figure("format_files_after", len(format_files()), "files", "<="),
        Figure("readme_lines", len(readme.splitlines()), "lines", "<=", 120),
        Figure(
            "longest_function", max(length for text in texts for length in function_lengths(text)), "lines", "<=", 69
        ),
        Figure("two_way_folder_pairs", len(pairs), "", "<=", 0),
        Figure("median_file_lines", median(lines), "lines", "<=", 115),
        Figure("product_lines", sum(lines), "lines", "<", 32243),
    ]


def main() -> None:
    """Print the figures, and record them when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast-s", type=float, help="seconds of `make fast`")
    parser.add_argument("--test-s", type=float, help="seconds of `make test`")
    parser.add_argument("--record", type=Path, help="results file, e.g. docs/results/house.json")
    options = parser.parse_args()
    by_command = {"make house": measure()}
    for name, seconds, goal in (("fast", options.fast_s, 60), ("test", options.test_s, 360)):
        if seconds is not None:
            by_command[f"make {name}"] = [Figure(f"{name}_s", seconds, "s", "<=", goal)]
    for figure in chain.from_iterable(by_command.values()):
        goal = "" if figure.goal is None else f"{figure.op} {figure.goal:g}"
        print(f"{figure.name:22} {figure.value:>8g} {figure.unit:6} {goal}")
    if options.record:
        for command, figures in by_command.items():
            append_results(options.record, result_rows(figures, command=command, **facts("cpu")))


if __name__ == "__main__":
    main()
