"""What docs/results.md says in words and tables, made of the finished runs; no number of it is written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable

from experiments import Results, Runs, Setting, Study, settings, variant
from gradwire.tools.train import tasks

SAME = 1.05  # bytes that are called equal
ENOUGH = 100  # the ratio of the target
WORDS = ("vgc", "strom")  # what the paper sends in 32 bits an element


def number(value: float) -> str:
    """A ratio, in as many digits as one reads."""
    if math.isinf(value):
        return "∞"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def kilobytes(n_bytes: float) -> str:
    return f"{n_bytes / 1000:,.1f}"


def listed(parts: Iterable[str]) -> str:
    *before, last = parts
    return f"{', '.join(before)} and {last}" if before else last


def table(study: Study) -> str:
    """A row a variant and learning rate; of several rates the best in bold."""
    score = study.score
    head = (
        "method",
        "seeds",
        f"{score.title}, last epoch",
        f"to Dense, {score.points}",
        "mean of the last tenth",
        "train loss, last epoch",
        "steps held back",
        "ratio, whole run",
        "ratio, last epoch",
        "kB a step in the paper's words",
        "kB a step as sent",
        "times fewer than float32",
    )
    rows = [head, ["---"] + ["---:"] * (len(head) - 1), *(_row(study, setting) for setting in study.settings)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(study: Study, setting: Setting) -> list[str]:
    score = study.score
    seen = score.shown(setting.score)
    if len(setting.scores) > 1:
        seen += f" ({min(setting.scores):.{score.digits}f} to {max(setting.scores):.{score.digits}f})"
    apart = -score.sign * study.lost(setting)  # nan without Dense
    bold = "**" * (setting in study.best and len(study.best) < len(study.settings))
    return [
        f"{bold}`{setting.name}`{bold}",
        str(len(setting.scores)),
        seen,
        f"{apart:+.{score.digits}f}" if math.isfinite(apart) and setting is not study.dense else "-",
        score.shown(setting.settled),
        f"{setting.train_loss:.3f}",
        number(setting.delay) if setting.delay else "-",
        number(setting.ratio),
        number(setting.last_ratio),
        kilobytes(4 * setting.parameters / setting.ratio) if setting.kind in WORDS else "-",
        kilobytes(setting.n_bytes),
        number(setting.times_fewer),
    ]


def best_at_bytes(study: Study) -> str:
    """What is best at its bytes: nothing that has run is better and sends as little."""
    kept = sorted(_unbeaten(study), key=lambda setting: -setting.n_bytes)
    names = [f"`{one.name}` ({study.score.shown(one.score)}, {kilobytes(one.n_bytes)} kB)" for one in kept]
    return f"Nothing that has run is better with as few bytes (to 5 %) than {listed(names)}.\n"


def _unbeaten(study: Study) -> list[Setting]:
    sign = study.score.sign
    return [
        one
        for one in study.best
        if not any(sign * (rival.score - one.score) > 0 and rival.n_bytes <= SAME * one.n_bytes for rival in study.best)
    ]


def summary(every: list[Results]) -> str:
    """Where VGC loses: a sentence over all settings, then a row a study that has Dense to compare with."""
    compared = [(results, study) for results in every for study in results.studies if study.dense]
    found = [(study, setting) for _, study in compared for setting in study.best if setting.kind == "vgc"]
    if not found:
        return "Nothing is known yet: no run of VGC has finished beside one of Dense.\n"
    by_optimizer = listed(
        f"{_worse([pair for pair in found if pair[0].optimizer == name])} with {name}"
        for name in dict.fromkeys(study.optimizer for study, _ in found)
    )
    lead = (
        f"**Where VGC loses.** After the same number of epochs VGC ends worse than Dense in {_worse(found)} settings "
        "that have run (a setting: an experiment, an optimizer, a method; plain: VGC without the optimizer's momentum, "
        f"and Dense with it where that is better): {by_optimizer}.{_outdone(compared)} "
        f"The table has VGC where it is best, at any ratio and at {ENOUGH} or more, each with its distance to Dense; "
        "all others are in the tables below.\n"
    )
    head = ("experiment", "seeds", "Dense", "VGC at its best", f"VGC at a ratio of {ENOUGH} or more")
    rows = [head, ["---"] * len(head), *(_verdict(results, study) for results, study in compared)]
    return lead + "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _worse(found: list[tuple[Study, Setting]]) -> str:
    worse = sum(study.lost(setting) > 0 for study, setting in found)
    return f"all {worse}" if worse == len(found) else f"{worse} of the {len(found)}"


def _verdict(results: Results, study: Study) -> list[str]:
    """One study's row."""
    assert study.dense is not None
    counts = sorted({len(setting.scores) for setting in study.best})
    vgc = [setting for setting in study.best if setting.kind == "vgc"]
    ahead = _first(study, vgc)
    enough = _first(study, [setting for setting in vgc if setting.ratio >= ENOUGH])
    return [
        f"{results.name}, {study.optimizer}, {results.plan.epochs} epochs",
        " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))),
        study.score.shown(study.dense.score),
        _outcome(study, ahead) if ahead else "-",
        _outcome(study, enough) if enough else "-",
    ]


def _first(study: Study, settings: list[Setting]) -> Setting | None:
    return max(settings, key=lambda setting: study.score.sign * setting.score, default=None)


def _outcome(study: Study, setting: Setting) -> str:
    score = study.score
    apart = f"{-score.sign * study.lost(setting):+.{score.digits}f}"
    return f"**{apart}** `{setting.name}`, {score.shown(setting.score)}, ratio {number(setting.ratio)}"


def _outdone(compared: list[tuple[Results, Study]]) -> str:
    """Where something that is not VGC is better than every VGC that sends as little."""
    ahead = {f"{results.name}, {study.optimizer}": _ahead(study) for results, study in compared}
    named = [f"{listed(names)} ({where})" for where, names in ahead.items() if names]
    return f" Better than every VGC that has run with as few bytes: {'; '.join(named)}." if named else ""


def _ahead(study: Study) -> list[str]:
    """Each by how much. Where no VGC sends as little there is nothing to compare."""
    score, names = study.score, []
    ours = [setting for setting in study.best if setting.kind == "vgc"]
    for one in (setting for setting in study.best if setting.kind not in ("vgc", "dense")):
        best = _first(study, [vgc for vgc in ours if vgc.n_bytes <= SAME * one.n_bytes])
        if best and (apart := score.sign * (one.score - best.score)) > 0:
            names.append(f"`{one.name}` by {apart:.{score.digits}f} {score.points}")
    return names


def runs(every: list[Results]) -> str:
    """What was run, where, and what was not."""
    lines = []
    for results in every:
        said = [
            f"- **`{results.name}`** ({results.plan.about}): {len(results.finished)} of {len(results.plan.runs)} runs"
        ]
        said[0] += f", {_origin(results)}." if results.finished else "."
        if results.missing:
            said.append(f"Not run: {'; '.join(_missing(results))}.")
        lines.append(" ".join(said))
    return "\n".join(lines) + "\n"


def _origin(results: Results) -> str:
    columns = [
        sorted({history.rows[-1][name] for history in results.finished.values()})
        for name in ("hardware", "torch", "commit")
    ]
    hardware, torch, commits = (" and ".join(found) for found in columns)
    return f"{hardware}, torch {torch}, commit {commits}"


def _missing(results: Results) -> list[str]:
    """By optimizer, in the order of the TOML."""
    found = []
    for optimizer in results.plan.every_optimizer:
        planned = settings(results.plan, optimizer)
        left = {triple: [run for run in runs if run not in results.finished] for triple, runs in planned.items()}
        names: list[str] = []
        for method, front in dict.fromkeys((method, front) for method, front, _ in planned):
            names += _missing_rates(method, front, planned, left)
        if any(left.values()):
            found.append(f"{optimizer}: {'all' if left == planned else ', '.join(names)}")
    return found


def _missing_rates(method: str, front: float, planned: Runs, left: Runs) -> list[str]:
    """Of one variant: its name alone where none of several learning rates has run."""
    rates = [rate for *pair, rate in planned if pair == [method, front]]
    if len(rates) > 1 and all(left[method, front, rate] == planned[method, front, rate] for rate in rates):
        return [f"`{variant(method, front)}` at every rate"]
    gone = {rate: [run.seed for run in left[method, front, rate]] for rate in rates}
    return [
        f"`{Setting(method, rate, (), front).name}`{_seeds(seeds, len(planned[method, front, rate]))}"
        for rate, seeds in gone.items()
        if seeds
    ]


def _seeds(numbers: list[int], every: int) -> str:
    """Named where only some are missing."""
    label = "seed" if len(numbers) == 1 else "seeds"
    return f" ({label} {', '.join(map(str, numbers))})" if len(numbers) < every else ""


def setup(results: Results) -> str:
    """One line of what the TOML says, and of the task's own values where it says nothing."""
    plan, kind = results.plan, tasks.find(results.plan.task)
    parameters = results.studies[0].settings[0].parameters
    decay = kind.weight_decay if plan.weight_decay is None else plan.weight_decay
    parts = [
        f"Task {plan.task}, {parameters:,.0f} parameters",
        f"{plan.workers} workers x {plan.batch or kind.batch}",
        f"{plan.epochs} epochs",
        f"weight decay {decay:g}",
        *([f"gradients clipped to a norm of {plan.clip:g}"] if plan.clip else []),
        "crops and flips" if plan.augment else "no augmentation",
        f"{plan.precision} autocast" if plan.precision != "float32" else "float32",
    ]
    return ", ".join(parts) + ".\n"


def rate(results: Results, study: Study) -> str:
    """The learning rate of one optimizer, and how it goes down."""
    plan = results.plan
    run = next(run for run in results.finished if run.optimizer == study.optimizer)
    said = f"Learning rate {plan.full_rate(run) / run.rate:g}"
    if course := plan.schedule.get(study.optimizer):
        said += f", halved after every 1/{course.times} of the run" if course.times else f", {course.kind}"
        said += f", warm-up over {course.warmup:.0%} of the run" if course.warmup else ""
    if any(run.rate != 1 for run in plan.runs):
        said += (
            "; times the factor behind the x. Pictures and the summary take every method at its best, chosen by the "
            "score shown"
        )
    return said + ".\n"
