"""Draws the rooms of the package from its own imports, and writes their table: `make rooms`.

docs/figures/rooms.svg and the table of docs/architecture.md between its two markers come from the source alone: the
order from pyproject.toml, what a room is for from the first line of its __init__.py, a dot for every pair of rooms of
which one imports from the other. A test compares (tests/test_docs.py), so neither can say what is not so; a line more
in a file changes neither.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "gradwire"
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "figures" / "rooms.svg"
BEGIN, END = "<!-- rooms:begin -->\n", "<!-- rooms:end -->\n"
LEFT, CELL = 120, 30  # pixels: beside and above the dots, of a room


def order() -> list[str]:
    """The rooms, highest first; those of one line import nothing from each other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    return [room.strip() for layer in layers for room in layer.split("|")]


def files_of(room: str) -> list[Path]:
    folder = SOURCE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{room}.py"]


def purpose(room: str) -> str:
    """The first line of its docstring."""
    folder = SOURCE / room
    path = folder / "__init__.py" if folder.is_dir() else SOURCE / f"{room}.py"
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def imports() -> set[tuple[str, str]]:
    """Which room imports from which; those for the type checker alone do not count."""
    found: set[tuple[str, str]] = set()
    for room in order():
        for path in files_of(room):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                    node.body = []
            names = [name for node in ast.walk(tree) for name in targets(node)]
            found.update((room, name) for name in names if name != room)
    return found


def targets(node: ast.AST) -> list[str]:
    """The rooms that one statement imports from."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module == "gradwire":
        modules = [f"gradwire.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        modules = [node.module] * len(node.names)
    else:
        return []
    rooms = set(order())
    parts = [module.split(".") for module in modules]
    return [part[1] for part in parts if part[0] == "gradwire" and len(part) > 1 and part[1] in rooms]


def picture() -> str:
    """A row for what a room uses, a dot in the column of each: below the diagonal there is none, so imports go down."""
    rooms, uses = order(), imports()
    size = LEFT + CELL * len(rooms) + 10
    box = f'viewBox="0 0 {size + 40} {size}" font-family="sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        "<style>text{fill:#333}.room{fill:#e8eef7;stroke:#4a6fa5}.use{fill:#4a6fa5}.line{stroke:#8884}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.room{fill:#223}}</style>",
    ]
    for number, room in enumerate(rooms):
        x = y = LEFT + CELL * number + CELL // 2
        parts += [
            f'<line class="line" x1="{LEFT}" y1="{y}" x2="{size - 10}" y2="{y}"/>',
            f'<line class="line" x1="{x}" y1="{LEFT}" x2="{x}" y2="{size - 10}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{room} uses</text>',
            f'<text transform="translate({x + 4} {LEFT - 8}) rotate(-50)">{room}</text>',
            f'<rect class="room" x="{x - 9}" y="{y - 9}" width="18" height="18" rx="4"/>',
        ]
    for upper, lower in sorted(uses):
        x, y = (LEFT + CELL * rooms.index(room) + CELL // 2 for room in (lower, upper))
        parts.append(f'<circle class="use" cx="{x}" cy="{y}" r="6"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def table() -> str:
    rows = [f"| `{room}` | {purpose(room)} |" for room in order()]
    return "\n".join(["| room | what it is for |", "|---|---|", *rows]) + "\n"


def rendered(page: str) -> str:
    """The page with the table as it is now."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + table() + END, page, flags=re.DOTALL)


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
