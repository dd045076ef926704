"""Measures the README's demo again and writes the table into it: `make docs-demo`.

docs/results/demo.csv is the measurement; the README between its two markers is rendered from that file and from
nothing else (tests/test_docs.py). `--render` renders it without measuring.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from gradwire.tools.train.demo import Record, table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = Path("docs/results/demo.csv")  # relative: the command is a column, and must not name a folder of a machine
BEGIN, END = "<!-- demo:begin -->\n", "<!-- demo:end -->\n"


def read_records() -> list[Record]:
    """The rows of the CSV."""
    with (ROOT / RESULTS).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def render(records: list[Record]) -> str:
    """The README's block: the table as the demo prints it, without the caption, and where it comes from."""
    shown = table(records)
    shown.caption = None
    text = io.StringIO()
    Console(file=text, width=120).print(shown)
    lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    last = records[-1]
    return (
        f"```\n{lines}\n```\n\n"
        f"A small model sends much in its first epochs; in the last one {last['method']} sends "
        f"{float(last['times_less_last_epoch']):.0f} times less.\n"
        f"{last['hardware']}, torch {last['torch']}, Python {last['python']}, ms/step of the median epoch: "
        f"[{RESULTS.name}]({RESULTS}), remade by `make docs-demo`.\n"
    )


def split(text: str) -> tuple[str, str, str]:
    """A text before, between and after the markers."""
    before, _, rest = text.partition(BEGIN)
    block, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README.name} does not have the lines {BEGIN.strip()} and {END.strip()}, in this order")
    return before, block, after


def main() -> None:
    """Measure, then render."""
    before, _, after = split(README.read_text(encoding="utf-8"))
    if "--render" not in sys.argv[1:]:
        subprocess.run([sys.executable, "-m", "gradwire", "demo", "--csv", str(RESULTS)], cwd=ROOT, check=True)
    README.write_text(before + BEGIN + render(read_records()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
