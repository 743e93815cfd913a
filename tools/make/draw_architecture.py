"""Draws docs/images/architecture.svg from the imports: rooms on their floors, and who imports whom.

Floors, purposes, arrows and frameworks are read from the code (`rooms.py`); only a room's column and colour are chosen
here. An arrow that a longer way implies is left out. `--check` changes nothing and fails when the picture is outdated.
"""

import argparse
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rooms import FORMATS, KERNELS, ROOT, purpose, read_floors, read_imports, without_implied

PICTURE = ROOT / "docs" / "images" / "architecture.svg"
FRAMEWORKS = ("megatron", "nemo_rl", "ray", "transformer_engine", "transformers", "triton", "vllm")
# Everybody may import what lies below this floor, so it is drawn without arrows.
LOWEST_ROOM = "losses"

WIDTH, TOP, GAP, CORNER = 1080, 34, 64, 9
BOX_WIDTH, BOX_HEIGHT = 236, 124
SLATE, TEAL, BLUE, PURPLE, AMBER = "#475569", "#0f766e", "#1d4ed8", "#7e22ce", "#b45309"
LEGEND = (
    "Imports point down, never to the same floor.",
    "An arrow is an import. One that a longer way implies is left out.",
    "A label names the frameworks that a package imports.",
    "Every package may import what loads no torch.",
)
# The centre of a room's column, and its colour.
COLUMNS = {
    "cli": (360, SLATE),
    "measure": (360, SLATE),
    "train": (360, TEAL),
    "nemo_rl": (652, TEAL),
    "cluster": (938, TEAL),
    "megatron": (506, BLUE),
    "checkpoints": (142, BLUE),
    "layers": (397, BLUE),
    "refit": (652, BLUE),
    "metrics": (938, PURPLE),
    "losses": (815, PURPLE),
}


@dataclass(frozen=True)
class Box:
    """Where a room stands: its centre, its top, and its width."""

    x: float
    y: float
    width: float = BOX_WIDTH


class Router:
    """Leads arrows down between boxes: along ports on their edges, and across in lanes between two floors."""

    def __init__(self, boxes: dict[str, Box], edges: list[tuple[str, str]]) -> None:
        self.boxes, self.edges = boxes, edges
        ends = {edge: (self._port(edge, 0), self._port(edge, 1)) for edge in edges}
        self.ends = {edge: (x1, x1 if self._is_wide(edge) else x2) for edge, (x1, x2) in ends.items()}
        self.lanes: dict[float, list[list[tuple[str, str]]]] = defaultdict(list)
        for edge in sorted(edges, key=self._outermost_last):
            if self.ends[edge][0] != self.ends[edge][1]:
                self._take_lane(edge)

    def way(self, edge: tuple[str, str]) -> list[tuple[float, float]]:
        """Return the corners of an arrow's way down, across and down again."""
        (x1, x2), top, bottom = self.ends[edge], self.boxes[edge[0]].y + BOX_HEIGHT, self.boxes[edge[1]].y
        if x1 == x2:
            return [(x1, top), (x2, bottom)]
        lanes = self.lanes[gap := self._gap(edge)]
        number = next(number for number, lane in enumerate(lanes) if edge in lane)
        y = gap + 14 + (GAP - 32) * (number + 0.5) / len(lanes)
        return [(x1, top), (x1, y), (x2, y), (x2, bottom)]

    def _is_wide(self, edge: tuple[str, str]) -> bool:
        return self.boxes[edge[1]].width > BOX_WIDTH

    def _port(self, edge: tuple[str, str], end: int) -> float:
        """Spread the arrows along one edge of a box, in the order of their other ends."""
        box = self.boxes[edge[end]]
        others = sorted((e for e in self.edges if e[end] == edge[end]), key=lambda e: self.boxes[e[1 - end]].x)
        return box.x + (others.index(edge) - (len(others) - 1) / 2) * 40

    def _outermost_last(self, edge: tuple[str, str]) -> float:
        """Return a rank by which arrows that start further out take the higher lane, so that they cross no other."""
        x1, x2 = self.ends[edge]
        return x1 if x2 < x1 else -x1

    def _gap(self, edge: tuple[str, str]) -> float:
        """Return where the gap begins in which an arrow goes across: below its room, or above what it points at."""
        top, bottom = self.boxes[edge[0]].y + BOX_HEIGHT, self.boxes[edge[1]].y
        between = [box for box in self.boxes.values() if top < box.y < bottom]
        is_free = all(abs(box.x - self.ends[edge][1]) > box.width / 2 + 8 for box in between)
        return top if is_free else bottom - GAP

    def _take_lane(self, edge: tuple[str, str]) -> None:
        left, right = sorted(self.ends[edge])
        for lane in (lanes := self.lanes[self._gap(edge)]):
            spans = [sorted(self.ends[other]) for other in lane]
            if all(right + 20 < start or end + 20 < left for start, end in spans):
                lane.append(edge)
                return
        lanes.append([edge])


def draw() -> str:
    """Return the picture as SVG."""
    floors, (imports, packages) = read_floors(), read_imports()
    lowest = next(row for row, floor in enumerate(floors) if LOWEST_ROOM in floor)
    ground = [*(module for floor in floors[lowest + 1 :] for module in floor), FORMATS]
    boxes = _place(floors[: lowest + 1])
    height = boxes[KERNELS].y + BOX_HEIGHT + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif">',
        _rect(WIDTH / 2, 0, WIDTH, height, 14, fill="#fff"),
    ]
    for y in sorted({box.y for box in boxes.values()}):
        parts.append(_rect(WIDTH / 2, y - 14, WIDTH - 16, BOX_HEIGHT + 28, 12, fill="#f1f5f9"))
    for number, line in enumerate(LEGEND):
        parts.append(_text(775, TOP + 32 + 24 * number, line, size=15, fill=SLATE))
    edges = without_implied(imports, set(boxes))
    router = Router(boxes, edges)
    for edge in sorted(edges, key=lambda e: (boxes[e[0]].y, boxes[e[0]].x, boxes[e[1]].x)):
        parts.append(_arrow(router.way(edge), COLUMNS[edge[0]][1]))
    for room, box in boxes.items():
        frameworks = [name for name in FRAMEWORKS if name in packages[room]]
        parts.append(_room(room, box, COLUMNS.get(room, (0, AMBER))[1], frameworks))
    parts.append(_ground(ground, Box(870, boxes[KERNELS].y, 372)))
    return "\n".join([*parts, "</svg>", ""])


def _place(floors: list[list[str]]) -> dict[str, Box]:
    if misplaced := sorted({room for floor in floors for room in floor} ^ set(COLUMNS)):
        raise SystemExit(f"{Path(__file__).name}: COLUMNS and the floors of pyproject.toml disagree about {misplaced}")
    rows = [TOP + row * (BOX_HEIGHT + GAP) for row in range(len(floors) + 1)]
    boxes = {room: Box(COLUMNS[room][0], rows[row]) for row, floor in enumerate(floors) for room in floor}
    return boxes | {KERNELS: Box(350, rows[-1], width=640)}


def _arrow(way: list[tuple[float, float]], colour: str) -> str:
    (x, y), path = way[0], [f"M{way[0][0]:g} {way[0][1]:g}"]
    if len(way) == 4:
        (x2, lane), side = way[2], CORNER if way[2][0] > x else -CORNER
        path.append(f"V{lane - CORNER:g}Q{x:g} {lane:g} {x + side:g} {lane:g}H{x2 - side:g}")
        path.append(f"Q{x2:g} {lane:g} {x2:g} {lane + CORNER:g}")
    x, y = way[-1]
    line = f'<path d="{"".join(path)}V{y - 8:g}" fill="none" stroke="{colour}" stroke-width="2"/>'
    return f'{line}<path d="M{x - 5:g} {y - 10:g}L{x + 5:g} {y - 10:g}L{x:g} {y - 1:g}Z" fill="{colour}"/>'


def _room(room: str, box: Box, colour: str, frameworks: list[str]) -> str:
    lines = [
        _rect(box.x, box.y, box.width, BOX_HEIGHT, 9, fill="#fff", stroke=colour, stroke_width="2"),
        _text(box.x, box.y + 24, room, size=18, weight="bold", fill=colour),
    ]
    for number, line in enumerate(textwrap.wrap(purpose(room).replace("`", ""), int(box.width / 7.4))):
        lines.append(_text(box.x, box.y + 45 + 16 * number, line, size=13, fill="#334155"))
    if frameworks:
        label = " ".join(frameworks)
        lines.append(_rect(box.x, box.y + BOX_HEIGHT - 10, 7.2 * len(label) + 18, 20, 10, fill=colour))
        lines.append(_text(box.x, box.y + BOX_HEIGHT + 4.5, label, size=12.5, fill="#fff"))
    return "\n".join(lines)


def _ground(modules: list[str], box: Box) -> str:
    dashed = {"fill": "#fff", "stroke": SLATE, "stroke_width": "2", "stroke_dasharray": "5 4"}
    lines = [
        _rect(box.x, box.y, box.width, BOX_HEIGHT, 9, **dashed),
        _text(box.x, box.y + 24, "no torch", size=18, weight="bold", fill=SLATE),
        _text(box.x, box.y + 45, "names, sizes, files and settings, for everybody", size=13, fill="#334155"),
    ]
    for number, line in enumerate(textwrap.wrap(", ".join(modules), 48)):
        lines.append(_text(box.x, box.y + 68 + 17 * number, line, size=13, fill=SLATE))
    return "\n".join(lines)


def _rect(x: float, y: float, width: float, height: float, radius: float, **style: str) -> str:
    """Return a rounded rectangle around x; `stroke_width` and the like as SVG spells them, with a dash."""
    styles = " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<rect x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" {styles}/>'


def _text(x: float, y: float, text: str, *, size: float, fill: str, weight: str = "normal") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="middle"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def main(arguments: list[str] | None = None) -> int:
    """Draws, or with --check only compares; returns 1 when the picture is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail when the picture is out of date")
    check = parser.parse_args(arguments).check
    picture = draw()
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture:
        return 0
    if check:
        print(f"out of date: {PICTURE.relative_to(ROOT)}; python tools/make/draw_architecture.py draws it anew")
        return 1
    PICTURE.write_text(picture, encoding="utf-8")
    print(f"drew {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
