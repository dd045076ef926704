"""What a plan says: a table, a verdict in words, and the same as a file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gradwire.plan.choose import Verdict, describe, duration, pays_below
from gradwire.plan.model import Cost, Network, Work
from gradwire.tools.result_files import csv_text, json_text

WIDE = {"encode_ms": "encode", "decode_ms": "decode", "exchange_ms": "exchange", "step_ms": "step"}
NARROW = {name: WIDE[name] for name in ("exchange_ms", "step_ms")}
LEAST = {"step_ms": WIDE["step_ms"]}


@dataclass(frozen=True)
class PlanReport:
    """All that was measured or given, and what follows from it."""

    title: str
    work: Work
    network: Network
    costs: Sequence[Cost]
    verdict: Verdict

    def rows(self) -> list[dict[str, Any]]:
        """One a method."""
        best = self.best_cast()
        rows = []
        for cost in self.costs:
            found = self.verdict.predictions[cost.spec]
            row = {
                "method": cost.spec,
                "bytes_a_step": sum(cost.handed_over(numel) for numel in self.work.buckets),
                "encode_ms": cost.encode_ms(self.work),
                "decode_ms": cost.decode_ms(self.work, self.network.workers),
                "exchange_ms": found.exchange_ms,
                "step_ms": found.step_ms,
                "against_best": found.step_ms / self.verdict.predictions[best.spec].step_ms - 1,
                "faster_below_mbit": None if cost is best else pays_below(self.work, self.network, cost, best),
                "bytes_on_link": found.bytes_on_link,
                "wire_ms": found.wire_ms,
                "chosen": cost.spec == self.verdict.chosen,
                "guess": cost.guess,
            }
            rows.append(row)
        return rows

    def best_cast(self) -> Cost:
        """The fastest of dense and bf16; of all, where they were not asked for."""
        casts = [cost for cost in self.costs if cost.kind == "sum"] or list(self.costs)
        return min(casts, key=lambda cost: self.verdict.predictions[cost.spec].step_ms)

    def show(self, console: Console) -> None:
        """The table as wide as the screen allows; where names would be cut even so, the lines are longer than it."""
        for columns, options in ((WIDE, False), (NARROW, False), (LEAST, False), (LEAST, True)):
            table = self.table(columns, options)
            width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
            if width <= console.width:
                break
        console.width = max(console.width, width)
        console.print(table)

    def table(self, times: Mapping[str, str] = WIDE, an_option_a_line: bool = False) -> Table:
        """One row a method; the chosen one is bold."""
        best, work, network = self.best_cast(), self.work, self.network
        buckets = f"{len(work.buckets)} bucket{'s' if len(work.buckets) != 1 else ''}"
        guessed = any(cost.guess for cost in self.costs)
        hidden = ", ".join(name for key, name in WIDE.items() if key not in times)
        shown = Table(
            title=f"{self.title}: {work.numel:,} parameters in {buckets}; {describe(network)}, "
            f"{network.latency_ms:.3g} ms a hop",
            title_justify="left",
            caption=f"A step alone: forward {duration(work.forward_ms)}, backward {duration(work.backward_ms)}, "
            f"after it {duration(work.after_ms)}. Sent: by one worker, to the collectives. Exchange: from the first "
            f"bucket ready to the last one back, beside the backward as far as it goes."
            + (" *: nobody has measured this method; its times are those of a usual one." if guessed else "")
            + (f" Not shown: {hidden}; --csv has all, and a wider screen." if hidden else ""),
            caption_justify="left",
        )
        shown.add_column("method", no_wrap=True)
        for name in ("kB sent", *times.values(), f"to {best.spec}", "faster\nbelow"):
            shown.add_column(name, justify="right", no_wrap=True)
        for row in self.rows():
            against = "-" if row["method"] == best.spec else f"{100 * row['against_best']:+.1f} %"
            name = re.sub(r"(?<=[:,])", "\n  ", row["method"]) if an_option_a_line else row["method"]
            name += " *" if row["guess"] else ""
            kilobytes, below = short(row["bytes_a_step"] / 1e3), rate(row["faster_below_mbit"])
            style = "bold" if row["chosen"] else None
            shown.add_row(name, kilobytes, *(duration(row[time]) for time in times), against, below, style=style)
        return shown

    def write_json(self, path: Path) -> None:
        """Everything, so that the plan can be checked later."""
        found = {
            "title": self.title,
            "verdict": {"chosen": self.verdict.chosen, "words": self.verdict.words},
            "network": asdict(self.network),
            "work": asdict(self.work),
            "costs": [asdict(cost) for cost in self.costs],
            "predictions": self.rows(),
        }
        path.write_text(json_text(found), encoding="utf-8")

    def write_csv(self, path: Path) -> None:
        """A row a method."""
        rows = self.rows()
        path.write_text(csv_text(list(rows[0]), rows), encoding="utf-8")


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def rate(mbit: float | None) -> str:
    """A break-even in words."""
    if mbit is None:
        return "-"
    return "any rate" if math.isinf(mbit) else f"{short(mbit)} Mbit/s"
