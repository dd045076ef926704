"""What a plan says: a table, a verdict in words, and the same as a file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gradwire.plan.choose import Verdict, describe, pays_below, percent
from gradwire.plan.duration import duration
from gradwire.plan.model import Cost, Network, Work
from gradwire.tools.result_files import csv_text, json_text

HEADS = {
    "bytes_a_step": "kB sent",
    "encode_ms": "encode",
    "decode_ms": "decode",
    "exchange_ms": "exchange",
    "step_ms": "step",
    "waiting": "waits",
    "against_best": "to {best}",
    "faster_below_mbit": "faster\nbelow",
}
# what is left out where the screen is too narrow, one after another; of what waits last, if there are local steps
LESS = (("encode_ms", "decode_ms"), ("exchange_ms",))
AGAINST = "against_best"
PLAIN_LEAST, LOCAL_LEAST = ("waiting",), ("faster_below_mbit",)


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
            every = 1 if cost.local is None else cost.local.every
            row = {
                "method": cost.spec,
                "bytes_a_step": cost.bytes_a_step(self.work),
                "encode_ms": cost.encode_ms(self.work) / every,
                "decode_ms": cost.decode_ms(self.work, self.network.workers) / every,
                "exchange_ms": found.exchange_ms,
                "step_ms": found.step_ms,
                "waiting": found.waiting,
                "round_ms": found.round_ms,
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
        casts = [cost for cost in self.costs if cost.is_cast] or list(self.costs)
        return min(casts, key=lambda cost: self.verdict.predictions[cost.spec].step_ms)

    def show(self, console: Console) -> None:
        """The table as wide as the screen allows; where names would be cut even so, the lines are longer than it."""
        last = LOCAL_LEAST if self.has_local else PLAIN_LEAST
        hidden: tuple[str, ...] = ()
        for fewer, an_option_a_line in (((), False), *((names, False) for names in (*LESS, last)), ((), True)):
            hidden += fewer
            table = self.table(hidden, an_option_a_line)
            width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
            if width <= console.width:
                break
        console.width = max(console.width, width)
        console.print(table)

    @property
    def has_local(self) -> bool:
        """Whether some of the methods are of local steps."""
        return any(cost.local is not None for cost in self.costs)

    def table(self, hidden: Sequence[str] = (), an_option_a_line: bool = False) -> Table:
        """One row a method; the chosen one is bold."""
        best, work, network = self.best_cast(), self.work, self.network
        buckets = f"{len(work.buckets)} bucket{'s' if len(work.buckets) != 1 else ''}"
        shown = Table(
            title=f"{self.title}: {work.numel:,} parameters in {buckets}; {describe(network)}, "
            f"{network.latency_ms:.3g} ms a hop",
            title_justify="left",
            caption=self.caption(hidden),
            caption_justify="left",
        )
        shown.add_column("method", no_wrap=True)
        heads = {key: head.format(best=best.spec) for key, head in HEADS.items() if key not in hidden}
        for head in heads.values():
            shown.add_column(head, justify="right", no_wrap=True)
        for row in self.rows():
            name = re.sub(r"(?<=[:,])", "\n  ", row["method"]) if an_option_a_line else row["method"]
            name += " *" if row["guess"] else ""
            cells = (cell(key, row[key]) if row["method"] != best.spec or key != AGAINST else "-" for key in heads)
            shown.add_row(name, *cells, style="bold" if row["chosen"] else None)
        return shown

    def caption(self, hidden: Sequence[str]) -> str:
        """What the columns mean."""
        work = self.work
        left_out = ", ".join(HEADS[key].replace("\n", " ") for key in HEADS if key in hidden)
        said = (
            f"A step alone: forward {duration(work.forward_ms)}, backward {duration(work.backward_ms)}, after it "
            f"{duration(work.after_ms)}.",
            "Sent: by one worker, to the collectives. Exchange: from the first bucket ready to the last one back, "
            "beside the backward as far as it goes.",
            "" if "waiting" in hidden else "Waits: the share of the time in which the training stands still.",
            "Of local steps (every=) all numbers are of an inner step on average." if self.has_local else "",
            "*: nobody has measured this method; its times are those of a usual one."
            if any(cost.guess for cost in self.costs)
            else "",
            f"Not shown: {left_out}; --csv has all, and a wider screen." if left_out else "",
        )
        return " ".join(filter(None, said))

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


def cell(key: str, value: float | None) -> str:
    """One number of a row."""
    if key == "faster_below_mbit" or value is None:
        return rate(value)
    if key == "bytes_a_step":
        return short(value / 1e3)
    if key == "waiting":
        return percent(value)
    return f"{100 * value:+.1f} %" if key == AGAINST else duration(value)


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def rate(mbit: float | None) -> str:
    """A break-even in words."""
    if mbit is None:
        return "-"
    return "any rate" if math.isinf(mbit) else f"{short(mbit)} Mbit/s"
