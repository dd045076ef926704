"""What is exact of which model, and how exact: docs/coverage.md, by `make coverage`.

Every model of zoo.py takes one backward in float32 under a recorder. Beside it stands the truth, in float64 and without
any of gradwire's code: each sample alone, its gradient squared. `--render` only writes the page from the CSV, and any
other argument measures the models whose names have it, and writes nothing.
"""

from __future__ import annotations

import copy
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import Kind, kinds
from gradwire.moments import Recorder, Row
from gradwire.tools.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "results" / "coverage.csv", ROOT / "docs" / "coverage.md"
BEGIN, END = "<!-- coverage:begin -->\n", "<!-- coverage:end -->\n"
BAR = 1e-5  # of a moment that is called exact, in float32
EXACT = ("exact", "by activation")
NOTHING = 1e-20  # of the model's largest moment: in float64, a gradient that is zero but for rounding
Moments = dict[str, Tensor]
Record = dict[str, str]
COLUMNS = ("model", "parameters", "exact", "by_activation", "estimated", "exact_share", "error", "worst", "reasons")


def trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in net.named_parameters() if param.requires_grad}


def by_sample(kind: Kind) -> Moments:
    """sum_b c_b^2, each sample differentiated alone."""
    net = copy.deepcopy(kind.net).double()
    moments = {name: torch.zeros_like(param) for name, param in trainable(net).items()}
    for b in range(kind.batch):
        net.zero_grad()
        (kind.loss(net, slice(b, b + 1)) / kind.batch).backward()
        for name, param in trainable(net).items():
            if param.grad is not None:
                moments[name] += param.grad.square()
    return moments


def by_activation(kind: Kind) -> Moments:
    """sum_b c_b^2 where samples interact; c_b: what flows into a layer's parameters if only what came back to sample
    b's outputs does, the layer's input being what it was.
    """
    net = copy.deepcopy(kind.net).double()
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str, given: tuple[Any, ...], output: Tensor) -> Tensor:
        output.retain_grad()
        kept[name] = (given[0].detach().clone(), output)
        return output.clone()  # for the in-place operations that follow

    layers = {name: layer for name, layer in net.named_modules() if layer._parameters}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda module, given, output, name=name: keep(name, given, output))
    (kind.loss(net, slice(None)) / kind.batch).backward()
    moments = {}
    for name, layer in layers.items():
        layer._forward_hooks.clear()
        x, output = kept[name]
        assert output.grad is not None
        params = dict(layer.named_parameters())
        found = [torch.zeros_like(param) for param in params.values()]
        for b in range(kind.batch):
            alone = torch.zeros_like(output.grad)
            alone[b] = output.grad[b]
            for moment, value in zip(found, torch.autograd.grad(layer(x), list(params.values()), alone), strict=True):
                moment += value.square()
        moments |= {f"{name}.{local}": moment for local, moment in zip(params, found, strict=True)}
    return moments


def recorded(kind: Kind) -> tuple[Moments, list[Row]]:
    """What gradwire finds in one backward of the whole batch, in float32."""
    kind.net.zero_grad()
    recorder = Recorder(kind.net, trainable(kind.net), **kind.options)
    try:
        (kind.loss(kind.net, slice(None)) / kind.batch).backward()
        return {name: recorder.moment(name).clone() for name in recorder.accounts}, recorder.coverage()
    finally:
        recorder.remove()


def errors(found: Moments, truth: Moments, exact: list[str]) -> dict[str, float]:
    """The largest error of each, relative to its largest element, or to the model's where its gradient is zero."""
    largest = {name: float(moment.abs().max()) for name, moment in truth.items()}
    whole = max(largest.values())
    return {
        name: float((found[name].double() - truth[name]).abs().max())
        / (largest[name] if largest[name] > NOTHING * whole else whole)
        for name in exact
    }


def measure(kind: Kind) -> Record:
    """One row of the table."""
    truth = by_activation(kind) if kind.interacting else by_sample(kind)
    found, coverage = recorded(kind)
    sizes = {name: moment.numel() for name, moment in found.items()}
    exact = [row.name for row in coverage if row.kind in EXACT]
    estimated = [row for row in coverage if row.kind not in EXACT]
    off = errors(found, truth, exact)
    worst = max(off, key=lambda name: off[name], default="")
    values = (
        kind.name,
        sum(sizes.values()),
        len(exact),
        sum(row.kind == "by activation" for row in coverage),
        len(estimated),
        f"{sum(sizes[name] for name in exact) / sum(sizes.values()):.4f}",
        f"{off[worst]:.1e}" if worst else "",
        worst,
        "; ".join(f"{count} x {why}" for why, count in Counter(row.why for row in estimated).most_common()),
    )
    return {name: str(value) for name, value in zip(COLUMNS, values, strict=True)}


def measured(part: str = "") -> Iterator[Record]:
    """The rows of the models whose names have this part, printed as they come."""
    torch.set_num_threads(1)  # the last digit of an error would follow the number of cores
    for kind in kinds():
        if part.lower() not in kind.name.lower():
            continue
        with torch.random.fork_rng():  # the next model is the same whichever were measured before
            record = measure(kind)
        print(", ".join(f"{name} {record[name]}" for name in ("model", "exact", "estimated", "error", "worst")))
        yield record


def read() -> list[Record]:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(records: Iterable[Record], path: Path = RESULTS) -> None:
    origin = provenance() | {"command": "make coverage"}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *origin), lineterminator="\n")
        writer.writeheader()
        writer.writerows(record | origin for record in records)


def render(records: list[Record]) -> str:
    """The table, then what is estimated and why."""
    lines = ["| model | parameters | exact | estimated | of all elements exact | largest error of an exact moment |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in records:
        indexed = f", {row['by_activation']} of them by activation" if row["by_activation"] != "0" else ""
        share, error = float(row["exact_share"]), row["error"]
        shown = f"**{error}**" if error and float(error) > BAR else error
        lines.append(
            f"| {row['model']} | {int(row['parameters']):,} | {row['exact']}{indexed} | {row['estimated']} "
            f"| {share:.1%} | {shown} |"
        )
    lines += ["", "What is estimated, and why:", ""]
    lines += [f"- {row['model']}: {row['reasons']}" for row in records if row["reasons"]]
    last = records[-1]
    lines += [
        "",
        f"{last['hardware']}, torch {last['torch']}, Python {last['python']}: [coverage.csv](results/coverage.csv).",
    ]
    return "\n".join(lines) + "\n"


def rendered(text: str, records: list[Record]) -> str:
    """The page with the table between its two markers."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE.name} does not have the lines {BEGIN.strip()} and {END.strip()}, in this order")
    return before + BEGIN + render(records) + END + after


def main() -> None:
    """Measures, then renders."""
    told = sys.argv[1:]
    if told and told[0] != "--render":
        for record in measured(told[0]):
            print(record["reasons"])
        return
    if not told:
        write(list(measured()))  # a failure leaves the old file
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")


if __name__ == "__main__":
    main()
