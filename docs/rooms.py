"""Draws the rooms of the package from its own imports, and writes their table: `make rooms`.

docs/figures/rooms.svg and the table of docs/architecture.md between its two markers come from the source alone: the
order from pyproject.toml, what a room is for from the first line of its __init__.py, an arc from every pair of rooms of
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
ROW, WIDTH, BOX, TOP = 38, 640, 130, 30  # pixels: of a row, the picture, a box, above the first


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
    """Rooms one below the other, an arc for each pair that imports: all of them go down on the right."""
    rooms = order()
    height = TOP + ROW * len(rooms) + 10
    middle = {room: TOP + ROW * number + ROW / 2 - 4 for number, room in enumerate(rooms)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<style>text{fill:#333}.room{fill:#e8eef7;stroke:#4a6fa5}.arc{fill:none;stroke:#4a6fa5;stroke-opacity:.5;stroke-width:1.5}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.room{fill:#223}}</style>",
        '<text x="10" y="18" font-size="13">Imports go down: an arc leads from a room to one that it uses.</text>',
    ]
    for upper, lower in sorted(imports()):
        begin, end = middle[upper], middle[lower]
        reach = BOX + 30 + (end - begin) * 0.95
        path = f"M{BOX + 10} {begin:.0f} C{reach:.0f} {begin:.0f} {reach:.0f} {end:.0f} {BOX + 10} {end:.0f}"
        parts.append(f'<path class="arc" d="{path}"/>')
    for room in rooms:
        y = middle[room]
        parts += [
            f'<rect class="room" x="10" y="{y - 14:.0f}" width="{BOX}" height="28" rx="5"/>',
            f'<text x="20" y="{y + 5:.0f}" font-size="13" font-weight="bold">{room}</text>',
        ]
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
