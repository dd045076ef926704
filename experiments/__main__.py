"""docs/results.md and its pictures from the committed runs: `python -m experiments`.

The page's text is written by hand; between two markers stands what this program makes of the TOMLs and CSVs.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import between
from experiments import Results, load, local_variance, plots, tables

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FIGURES = DOCS / "results.md", DOCS / "figures"


def link(file: str) -> str:
    return f"![{file.removesuffix('.svg').replace('_', ' ')}](figures/{file})\n"


def experiments(every: list[Results]) -> str:
    """A section an experiment with finished runs, in it one an optimizer: table and pictures."""
    drawn, blocks = plots.pictures(every), []
    for results in every:
        if not results.studies:
            continue
        blocks.append(f"### {results.name}\n{results.plan.about}.\n\n{tables.setup(results)}")
        blocks += map(link, drawn[results.name])
        for study in results.studies:
            blocks.append(f"#### {results.name}, {study.optimizer}\n{tables.rate(results, study)}")
            blocks += [tables.table(study), tables.best_at_bytes(study)]
            blocks += map(link, drawn[f"{results.name} {study.optimizer}"])
    return "\n".join(blocks)


def render(text: str, every: list[Results]) -> str:
    """The page with all its blocks written anew."""
    makers = {
        "summary": tables.summary,
        "runs": tables.runs,
        "local-variance": lambda every: local_variance.table(),
        "experiments": experiments,
    }
    for name, make in makers.items():
        text = between(text, name, make(every))
    return text


def main() -> None:
    every = load()
    text = render(PAGE.read_text(encoding="utf-8"), every)
    plots.write(every, FIGURES)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
