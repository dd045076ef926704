"""The tables of docs/methods.md, from the rows of methods_cpu and oracles_cpu."""

from __future__ import annotations

from collections.abc import Sequence

DENSE = "dense"
STEP, BITS, DIGITS = ", step", ", bits a parameter", ", bits a parameter of digits"
Row = dict[str, str]


def tables(rows: Sequence[Row]) -> str:
    """Every method beside Dense, then beside its twins."""
    if not rows:
        return ""
    return "\n".join([_source(rows), "", *_alone(rows), "", *_twins(rows)]) + "\n"


def _source(rows: Sequence[Row]) -> str:
    first = rows[0]
    return f"{first['hardware']}, torch {first['torch']}, `{first['command']}`"


def _alone(rows: Sequence[Row]) -> list[str]:
    found = {(row["what"], row["against"]): row for row in rows}
    lines = ["| method | bits a parameter, digits | bits, MLP | step, ms | Dense beside it, ms | ratio |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        if not row["what"].endswith(DIGITS):
            continue
        spec = row["what"].removesuffix(DIGITS)
        times, bits = (found.get((spec + kind, DENSE)) for kind in (STEP, BITS))
        cells = [f"`{spec}`", _short(row["measured"])]
        cells += [_short(bits["measured"]) if bits else "32", *(_cells(times) if times else ("", "", ""))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _twins(rows: Sequence[Row]) -> list[str]:
    lines = ["| ours | theirs | step, ms: ours | theirs | ratio | bits: ours | theirs | ratio |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    others = [row for row in rows if row["against"] != DENSE]
    bits = {(row["what"].removesuffix(BITS), row["against"]): row for row in others if row["what"].endswith(BITS)}
    for row in others:
        if not row["what"].endswith(STEP):
            continue
        spec = row["what"].removesuffix(STEP)
        beside = bits.get((spec, row["against"]))
        cells = [*_cells(row), *(_cells(beside) if beside else ("", "", ""))]
        lines.append(f"| {' | '.join([f'`{spec}`', row['against'], *cells])} |")
    return lines


def _cells(row: Row) -> tuple[str, str, str]:
    ratio = f"**{row['ratio']}, missed**" if row["holds"] == "NO" else row["ratio"]
    return _short(row["measured"]), _short(row["reference"]), ratio


def _short(number: str) -> str:
    return f"{float(number):.3g}" if number else ""


def oracles(rows: Sequence[Row]) -> str:
    """Ours beside other projects' numbers."""
    if not rows:
        return ""
    lines = [_source(rows), "", "| what | against | ours, or the difference | theirs | ratio | bar |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        verdict = {"yes": f"{row['bar']}, holds", "NO": f"**{row['bar']}, missed**", "": ""}[row["holds"]]
        compared = row["reference"] != "1"  # else it is a difference, in its unit
        theirs, ratio = (row["reference"], row["ratio"]) if compared else ("", "")
        measured = f"{_short(row['measured'])} {row['unit']}".strip()
        lines.append(f"| {' | '.join((row['what'], row['against'], measured, _short(theirs), ratio, verdict))} |")
    return "\n".join(lines) + "\n"
