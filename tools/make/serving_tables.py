"""Rewrites the tables of docs/guide/serving.md: supported models, and how many GPUs an expert can be split over.

They stand between `<!-- generated: NAME -->` and `<!-- /generated -->`. `--check` changes nothing and fails when one is
out of date.
"""

import argparse
import re
import sys
from pathlib import Path

from qarl_formats import BASELINE, FORMAT_NAMES, QuantFormat, get_format
from qarl_nemo.architecture import FAMILIES
from qarl_nemo.measure.speed.shapes import read_shapes, shape_refusals

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "serving.md"
MODEL = ROOT / "examples" / "models" / "qwen3-30b-a3b"
_BLOCK = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def models() -> str:
    """Return the supported models, their targets, and which commands take them."""
    lines = [
        "| `model_type` | class | targets | `quantize`, `train`, `compare` | `convert`, NeMo-RL |",
        "|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        targets = "`experts`, `attention`; `mlp` in dense layers" if family.experts else "`mlp`, `attention`"
        lines.append(f"| `{name}` | `{family.class_name}` | {targets} | yes | {'yes' if family.megatron else 'no'} |")
    return "\n".join(lines)


def split_formats() -> list[QuantFormat]:
    """Return every quantized format, once for each group size."""
    names = [name for name in FORMAT_NAMES if name != BASELINE]
    return [get_format(name, group_size=size) for name in names for size in get_format(name).group_sizes or (None,)]


def splits() -> str:
    """Return how many GPUs each format lets vLLM split an expert of Qwen3-30B-A3B over."""
    shapes, sizes = read_shapes(MODEL), (1, 2, 4, 8)
    lines = [
        "| format | " + " | ".join(f"TP {size}" for size in sizes) + " | whole experts (EP) |",
        "|---|" + "---|" * 5,
    ]
    for fmt in split_formats():
        split = [shape_refusals(shapes, fmt, ["experts"], tensor_parallel_size=size) for size in sizes]
        whole = shape_refusals(shapes, fmt, ["experts"], tensor_parallel_size=8, enable_expert_parallel=True)
        cells = " | ".join("no" if refusals else "yes" for refusals in [*split, whole])
        groups = f", groups of {fmt.group_size}" if len(fmt.group_sizes) > 1 else ""
        lines.append(f"| `{fmt.name}`{groups} | {cells} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Rewrites, or with --check only compares; returns 1 when a table is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when a table is out of date")
    check, text = parser.parse_args(arguments).check, PAGE.read_text(encoding="utf-8")
    tables = {"models": models, "splits": splits}
    rendered = _BLOCK.sub(lambda block: f"{block[1]}{tables[block['name']]()}\n{block[3]}", text)
    if rendered != text and not check:
        PAGE.write_text(rendered, encoding="utf-8")
    if rendered != text:
        print(f"{'out of date' if check else 'rewrote'}: {PAGE.relative_to(ROOT)}")
    return int(check and rendered != text)


if __name__ == "__main__":
    sys.exit(main())
