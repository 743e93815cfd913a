"""What every program here takes, and how it calls an arm."""

import argparse
import re
from pathlib import Path


def parser_of(description: str | None, results: str) -> argparse.ArgumentParser:
    """Return a parser with `--record`, whose default is docs/results/`results`.json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path(f"docs/results/{results}.json"), help="file to append to")
    return parser


def slug(text: str) -> str:
    """Return `text` as an identifier."""
    return re.sub(r"\W+", "_", text).lower()
