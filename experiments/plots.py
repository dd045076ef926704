"""The pictures of docs/results.md: which there are follows from the runs; matplotlib is imported when one is drawn.

A method has one colour in all of them: a hue a family of methods, a shade and a dash a member.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from experiments import History, Results, Score, Setting, Study, is_local, variant
from gradwire.tools.experiment.experiment_file import Experiment
from gradwire.tools.result_files import Table
from gradwire.tools.train.cifar10 import make_network
from gradwire.tools.train.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Sizes = dict[str, tuple[int, bool]]  # of a tensor by its name: elements, and whether it is a matrix
MOST = 7  # lines of a panel beside Dense
SHADES = {
    "dense": ("#000000",),
    "vgc": ("#0b2f7a", "#2f7de1", "#6c8fd0"),
    "vgc density": ("#0d6b70", "#1fb0c4", "#5fb39b", "#00838f", "#8fd3de", "#3d5a5c", "#7fdcb0"),
    "vgc tau": ("#5b1a8b", "#a05fe0", "#c78be0"),
    "vgc feedback": ("#0a5c36", "#2ba36a", "#8cbf3f"),
    "vgc density momentum": ("#b3005e", "#f0509b", "#ff9ec9"),
    "strom": ("#8f1d0c", "#e8643b", "#f2a65a"),
    "qsgd": ("#6b4f00", "#b8860b", "#d9b93b"),
    # local steps of any method: nine, as with four dashes an odd number makes the most looks
    "local": (
        *("#1b3a1f", "#3f7d20", "#72b01d", "#b5c99a", "#454955"),
        *("#8d5b4c", "#d4a373", "#7b2d26", "#c06c84"),
    ),
}
OTHERS = ("#8c0b52", "#5c5c5c", "#738500", "#9c4f38", "#e0559b", "#008f8f", "#3f3f99", "#c92a2a", "#5f7f95", "#9f7fb8")
# Options that make another family of a method; all others are a matter of degree.
KINDS = {"vgc": {"tau", "feedback", "floor", "rounding", "density", "momentum"}, "topk": {"momentum"}}
DASHES = ("-", "--", "-.", ":")
FILLS = dict(zip(DASHES, ("full", "none", "left", "bottom"), strict=True))  # what a dash is to a point
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "h", "*")
BEST = "dense at its best"  # with or without momentum: what all are compared with
TICKS = {1: (10, 30, 50, 60, 70, 75, 80, 84, 86, 88, 90, 92, 94, 96, 98), -1: (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8)}


@dataclasses.dataclass(frozen=True)
class Style:
    color: str
    dash: str
    marker: str


def family(method: str) -> str:
    """The method's name, and the options that make it another one; local steps are one family."""
    if is_local(method):
        return "local"
    name, _, options = method.lower().partition(":")
    given = {option.partition("=")[0].strip() for option in options.split(",")}
    return " ".join([name, *sorted(given & KINDS.get(name, set()))])


def lighter(color: str) -> tuple[str, ...]:
    """The colour, and the same with a third and with half of white."""
    parts = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    return tuple("#" + "".join(f"{round(p + (255 - p) * white):02x}" for p in parts) for white in (0, 0.33, 0.5))


def styles(every: Iterable[Results]) -> dict[str, Style]:
    """Of all variants that any TOML names, run or not: a run that is added changes no other's colour."""
    families: dict[str, list[str]] = {}
    named = [(run.is_local, run.front, run.label) for results in every for run in results.plan.runs]
    for _, front, method in dict.fromkeys(sorted(named, key=lambda one: one[:2])):
        families.setdefault(family(method), []).append(variant(method, front))
    unnamed = [name for name in families if name not in SHADES]
    found = {}
    for place, (name, members) in enumerate(families.items()):
        shades = SHADES[name] if name in SHADES else lighter(OTHERS[unnamed.index(name) % len(OTHERS)])
        for number, member in enumerate(members):
            color, dash = shades[number % len(shades)], DASHES[number % len(DASHES)]
            found[member] = Style(color, dash, MARKERS[place % len(MARKERS)])
    return found


def panels(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Families side by side while there is room for them, Dense in every panel."""
    dense = [setting for setting in settings if setting.kind == "dense"]
    families: dict[str, list[Setting]] = {}
    for setting in settings:
        if setting.kind != "dense":
            families.setdefault(family(setting.method), []).append(setting)
    found: list[list[Setting]] = [[]]
    for members in families.values():
        for part in (members[begin : begin + MOST] for begin in range(0, len(members), MOST)):
            if len(found[-1]) + len(part) > MOST:
                found.append([])
            found[-1] += part
    return [dense + panel for panel in found]


def numels(plan: Experiment) -> Sizes:
    """Of every tensor its size, and whether it is a matrix; empty for a task whose network is not known here."""
    options: dict[str, Any] = dict(plan.model)
    with torch.device("meta"):
        if plan.task == "cifar10":
            model: torch.nn.Module = make_network()
        elif plan.task == "text":
            model = dataclasses.replace(Text(torch.empty(0), Path()), **options).make_model()
        else:
            return {}
    return {name: (tensor.numel(), tensor.dim() > 1) for name, tensor in model.named_parameters()}


def pictures(every: list[Results]) -> dict[str, dict[str, Callable[[], Figure]]]:
    """By section ("paper-100" and "paper-100 sgd") the files and what draws each."""
    found: dict[str, dict[str, Callable[[], Figure]]] = {}
    looks = styles(every)
    for results in every:
        stem = f"results_{results.name}"
        if results.studies:
            found[results.name] = {f"{stem}_bytes.svg": partial(draw_bytes, results, looks)}
        for study in results.studies:
            files: dict[str, Callable[[], Figure]] = {}
            files[f"{stem}_{study.optimizer}_score.svg"] = partial(draw_scores, study, looks)
            if sparse := [s for s in study.best if any(set(h.column("ratio")) != {1.0} for h in s.histories)]:
                files[f"{stem}_{study.optimizer}_ratio.svg"] = partial(draw_ratios, sparse, looks)
            sizes = numels(results.plan)
            if layered := [setting for setting in study.best if setting.kind == "vgc" and _covers(setting, sizes)]:
                files[f"{stem}_{study.optimizer}_layers.svg"] = partial(draw_layers, layered, sizes, looks)
            found[f"{results.name} {study.optimizer}"] = files
    return found


def _covers(setting: Setting, sizes: Sizes) -> bool:
    """Whether the file of layers is of that network."""
    layers = setting.histories[0].layers
    return bool(sizes and layers) and sizes.keys() <= layers[0].keys()


def canvas(count: int, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """So many panels, in rows of `columns`; one alone has the width of both."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradwire"  # or every run would make another file
    from matplotlib import pyplot

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(11, height * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])


def up_is_better(axes: Axes, score: Score) -> None:
    """The error on a log scale: 90 % and 86 % are to be told apart, and 10 % is to be seen too."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    if score.sign > 0:
        axes.set_yscale("function", functions=(_height, _accuracy))
        axes.set_ylabel(f"{score.title}, {score.unit} (error on a log scale)")
    else:
        axes.set_yscale("log")
        axes.invert_yaxis()
        axes.set_ylabel(f"{score.title} (log scale, less is better)")
    low, high = sorted(axes.get_ylim())
    ticks = [tick for tick in TICKS[score.sign] if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks) if len(ticks) > 3 else MaxNLocator(6))
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def _height(accuracy: Any) -> Any:
    return -np.log(np.maximum(100 - np.asarray(accuracy), 0.05))  # 100 % must be somewhere


def _accuracy(height: Any) -> Any:
    return 100 - np.exp(-np.asarray(height))


def beside(axes: Axes) -> None:
    """The legend, where it hides no line."""
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def finite(values: Iterable[float]) -> list[float]:
    """What is infinite is left out."""
    return [value if math.isfinite(value) else math.nan for value in values]


def draw_line(
    axes: Axes, setting: Setting, style: Style, values: Callable[[History], list[float]], name: str = ""
) -> None:
    """The median over the seeds; a band from the lowest to the highest where there are several."""
    of_seeds = list(zip(*(values(history) for history in setting.histories), strict=True))
    epochs = range(1, len(of_seeds) + 1)
    low, middle, high = (finite(map(take, of_seeds)) for take in (min, median, max))
    axes.plot(epochs, middle, style.dash, label=name or setting.name, linewidth=1.4, color=style.color)
    if len(setting.histories) > 1:
        axes.fill_between(epochs, low, high, color=style.color, alpha=0.15)


def draw_scores(study: Study, looks: dict[str, Style]) -> Figure:
    groups = panels(study.best)
    figure, every = canvas(len(groups), 4.2)
    for axes, group in zip(every, groups, strict=True):
        for setting in group:
            draw_line(axes, setting, looks[setting.variant], lambda history: history.scores)
        if study.dense and study.dense not in group:
            draw_line(axes, study.dense, Style("#000000", ":", "o"), lambda history: history.scores, BEST)
        up_is_better(axes, study.score)
        axes.set_xlabel("epoch")
        beside(axes)
    return figure


def draw_ratios(settings: Sequence[Setting], looks: dict[str, Style]) -> Figure:
    groups = panels(settings)
    figure, every = canvas(len(groups), 3.6)
    for axes, group in zip(every, groups, strict=True):
        for setting in group:
            draw_line(axes, setting, looks[setting.variant], lambda history: history.column("ratio"))
        axes.set_yscale("log")
        axes.set(xlabel="epoch", ylabel="ratio (none where nothing was sent)")
        axes.grid(alpha=0.3)
        beside(axes)
    return figure


def draw_bytes(results: Results, looks: dict[str, Style]) -> Figure:
    """A panel an optimizer, a point a method, the seeds' range as a bar."""
    figure, every = canvas(len(results.studies), 5.0, columns=2)
    for axes, study in zip(every, results.studies, strict=True):
        for setting in study.best:
            style, score = looks[setting.variant], setting.score
            if math.isfinite(score):
                seen = [one for one in setting.scores if math.isfinite(one)]
                spread = [[score - min(seen)], [max(seen) - score]]
                look: dict[str, Any] = {"fmt": style.marker, "color": style.color, "label": setting.variant}
                axes.errorbar([setting.n_bytes], [score], yerr=spread, fillstyle=FILLS[style.dash], **look)
        if study.dense:
            axes.axhline(study.dense.score, color="#000000", linestyle=":", linewidth=1, label=BEST)
        axes.set_xscale("log")
        axes.set(xlabel="bytes a step, as sent by one worker", title=f"{results.name}, {study.optimizer}")
        up_is_better(axes, study.score)
    handles = {label: handle for axes in every for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [name for name in (BEST, *looks) if name in handles]
    figure.legend([handles[name] for name in names], names, fontsize=8, loc="outside right upper", frameon=False)
    return figure


def draw_layers(settings: Sequence[Setting], sizes: Sizes, looks: dict[str, Style]) -> Figure:
    """A panel a method: first, middle and last epoch of its first seed; matrices as a line, vectors as crosses."""
    names = [name.removesuffix(".weight") for name in sizes]
    figure, every = canvas(len(settings), 2.8 + 0.05 * max(map(len, names)), columns=2)
    matrices = [place for place, (_, matrix) in enumerate(sizes.values()) if matrix]
    vectors = [place for place in range(len(sizes)) if place not in matrices]
    for axes, setting in zip(every, settings, strict=True):
        layers, color = setting.histories[0].layers, looks[setting.variant].color
        for row, dash, alpha in zip(_three(layers), (":", "--", "-"), (0.35, 0.65, 1.0), strict=True):
            ratios = [_ratio(size, float(row[name])) for name, (size, _) in sizes.items()]
            look: dict[str, Any] = {"color": color, "alpha": alpha, "markersize": 3}
            axes.plot(matrices, [ratios[p] for p in matrices], dash, marker="o", label=f"epoch {row['epoch']}", **look)
            axes.plot(vectors, [ratios[p] for p in vectors], "x", **look)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, math.sqrt(low * high / 10)), max(high, math.sqrt(low * high * 10)))  # a decade or more
        axes.set_xticks(matrices, [names[place] for place in matrices], rotation=90, fontsize=6)
        axes.set(ylabel="ratio of the tensor", title=setting.name)
        axes.grid(alpha=0.3)
        beside(axes)
    return figure


def _three(layers: Table) -> Table:
    return [layers[0], layers[(len(layers) - 1) // 2], layers[-1]]


def _ratio(size: int, elements: float) -> float:
    return size / elements if elements else math.nan


def write(every: list[Results], folder: Path) -> None:
    """All pictures; those of runs that are no more go."""
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made = set()
    for files in pictures(every).values():
        for name, draw in files.items():
            figure = draw()
            figure.savefig(folder / name, metadata={"Date": None})
            pyplot.close(figure)
            made.add(name)
    for path in folder.glob("results_*.svg"):
        if path.name not in made:
            path.unlink()
