"""Rewrites the blocks between `<!-- results:NAME -->` and `<!-- /results -->` in README.md and docs/.

NAME stands for docs/results/NAME.json. Its rows become a table, or with `rows=a,b columns=c,d cell={row}_x_{column}` in
the opening marker a grid of the figures so called; `only=*_bandwidth` keeps the rows whose names match, and
`hardware=H200` those that were measured on such a machine.
"""

import argparse
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from qarl_nemo.metrics.results import read_results, render_grid, render_table

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


def main(arguments: list[str] | None = None) -> int:
    """Renders, or with --check only compares; returns 1 when a document is out of date, 2 when one is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--docs", type=Path, default=Path(__file__).parents[1] / "docs", help="README.md lies beside it"
    )
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a table is out of date")
    options = parser.parse_args(arguments)
    stale, broken = [], []
    readme = options.docs.with_name("README.md")
    for document in sorted([*options.docs.rglob("*.md"), *([readme] if readme.exists() else [])]):
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
