"""Rewrites the blocks between `<!-- results:NAME -->` and `<!-- /results -->` in README.md, CONTRIBUTING.md and docs/.

NAME stands for docs/results/NAME.json. Its rows become a table, or with `rows=a,b columns=c,d cell={row}_x_{column}` in
the opening marker a grid of the figures so called; `only=*_bandwidth` keeps the rows whose names match, and
`hardware=H200` those that were measured on such a machine.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from qarl_nemo.metrics.results import ResultRow, read_results

_BLOCK = re.compile(
    r"(<!-- results:(?P<name>[\w-]+)(?P<options>( \w+=\S+)*) -->\n)(?P<table>.*?)(?P<end><!-- /results -->)", re.DOTALL
)


def render_document(text: str, results_dir: Path) -> str:
    """Return `text` with every results block rendered anew.

    Args:
        text: Markdown.
        results_dir: folder of the NAME.json files.

    Raises:
        ValueError: blocks name results that do not exist, or a marker has no counterpart.
    """
    names = [match["name"] for match in _BLOCK.finditer(text)]
    markers = len(re.findall(r"<!-- results:", text)), len(re.findall(r"<!-- /results -->", text))
    if markers != (len(names), len(names)):
        raise ValueError(f"{markers[0]} opening and {markers[1]} closing markers make only {len(names)} blocks")
    missing = sorted({name for name in names if not (results_dir / f"{name}.json").exists()})
    if missing:
        raise ValueError(f"no results for {missing} in {results_dir}")
    return _BLOCK.sub(lambda match: f"{match[1]}{_render(match, results_dir)}\n{match['end']}", text)


def _render(block: re.Match[str], results_dir: Path) -> str:
    options = dict(option.split("=", 1) for option in block["options"].split())
    machine = options.pop("hardware", "")
    rows = [row for row in read_results(results_dir / f"{block['name']}.json") if machine in row.hardware]
    if set(options) == {"rows", "columns", "cell"}:
        return render_grid(rows, options["rows"].split(","), options["columns"].split(","), options["cell"])
    if set(options) <= {"only"}:
        return render_table([row for row in rows if fnmatchcase(row.name, options.get("only", "*"))])
    raise ValueError(
        f"results:{block['name']} has options {sorted(options)} (legal: rows, columns and cell, or only; hardware)"
    )


def render_table(rows: Sequence[ResultRow]) -> str:
    """Render rows as Markdown tables, without a final newline: one under each machine, day and command."""
    runs: dict[str, list[ResultRow]] = {}
    for row in rows:
        runs.setdefault(f"{row.hardware}, {row.date}: `{row.command}`", []).append(row)
    return "\n\n".join(f"{run}\n\n{_table(measured)}" for run, measured in runs.items())


def _table(rows: Sequence[ResultRow]) -> str:
    goals = any(row.goal is not None for row in rows)
    lines = (
        ["| figure | value | goal | met |", "|---|---:|---:|---|"] if goals else ["| figure | value |", "|---|---:|"]
    )
    for row in rows:
        cells = [f"`{row.name}`", f"{_format(row.value)} {row.unit}".rstrip()]
        if goals:
            goal = "" if row.goal is None else f"{row.op} {_format(row.goal)}"
            cells += [goal, {None: "", True: "yes", False: "**no**"}[row.met]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render_grid(rows: Sequence[ResultRow], lines: Sequence[str], columns: Sequence[str], cell: str) -> str:
    """Render figures that differ in two words of their name as a Markdown grid; a missed goal is bold.

    A unit that all figures share stands in the corner; else one that a line or a column shares, beside its name.

    Args:
        rows: rows to look in.
        lines: values of `{row}`, one line each.
        columns: values of `{column}`, one column each.
        cell: name of a cell's figure, e.g. `{row}_mlp_forward_ratio_{column}`.

    Returns:
        Table lines joined by newlines, without a final one; a figure nobody measured is an empty cell.

    Raises:
        ValueError: no cell names a figure.
    """
    figures = {row.name: row for row in rows}
    names = [[cell.format(row=line, column=column) for column in columns] for line in lines]
    if not any(name in figures for line in names for name in line):
        raise ValueError(f"no figure is called like {names[0][0]}")
    found = [[figures.get(name) for name in line] for line in names]
    corner = _shared_unit(row for line in found for row in line)
    beside = ["" if corner else _shared_unit(line) for line in found]
    above = ["" if corner or any(beside) else _shared_unit(column) for column in zip(*found, strict=True)]
    head = " | ".join(f"{column}{unit and f', {unit}'}" for column, unit in zip(columns, above, strict=True))
    table = [f"| {corner and f'{corner} '}| {head} |", "|---|" + "---:|" * len(columns)]
    for line, unit, measured in zip(lines, beside, found, strict=True):
        said = [corner or unit or column for column in above]
        values = ("" if row is None else _cell(row, bool(said[i])) for i, row in enumerate(measured))
        table.append(f"| `{line}`{unit and f', {unit}'} | {' | '.join(values)} |")
    return "\n".join(table)


def _shared_unit(rows: Iterable[ResultRow | None]) -> str:
    units = {_unit(row) for row in rows if row is not None}
    return units.pop() if len(units) == 1 else ""


def _unit(row: ResultRow) -> str:
    return "" if row.unit == "fraction" else row.unit


def _cell(row: ResultRow, bare: bool) -> str:
    # A fraction near one and a ratio beside its goal differ in late digits.
    number = f"{row.value:,.0f}" if abs(row.value) >= 9999.5 else f"{row.value:.4g}"
    value = f"{row.value:.6g}" if row.unit == "fraction" else f"{number} {'' if bare else row.unit}".rstrip()
    return f"**{value}**" if row.met is False else value


def _format(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def main(arguments: list[str] | None = None) -> int:
    """Renders, or with --check only compares; returns 1 when a document is out of date, 2 when one is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--docs",
        type=Path,
        default=Path(__file__).parents[1] / "docs",
        help="README.md and CONTRIBUTING.md lie beside it",
    )
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a table is out of date")
    options = parser.parse_args(arguments)
    stale, broken = [], []
    beside = (options.docs.with_name(name) for name in ("README.md", "CONTRIBUTING.md"))
    for document in sorted([*options.docs.rglob("*.md"), *(page for page in beside if page.exists())]):
        text = document.read_text(encoding="utf-8")
        try:
            rendered = render_document(text, options.docs / "results")
        except ValueError as error:
            broken.append(f"{document.name}: {error}")
            continue
        if rendered != text:
            stale.append(document.name)
            if not options.check:
                document.write_text(rendered, encoding="utf-8")
    if broken:
        print("\n".join(broken), file=sys.stderr)
        return 2
    if stale:
        print(f"{'out of date' if options.check else 'rewrote'}: {', '.join(stale)}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
