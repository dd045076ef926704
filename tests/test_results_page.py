"""docs/results.md shows what the committed runs hold, and the figures made of a run are right."""

from __future__ import annotations

import csv
import math
import re

import pytest

from experiments import History, Setting, load, plots, tables
from experiments.__main__ import FIGURES, PAGE, render

PARAMETERS = 1000
PLAN = """
about = "made up"
task = "cifar10"
epochs = 2
optimizers = ["sgd", "adam"]
methods = ["dense", "vgc:alpha=1", "vgc:alpha=2", "strom:tau=0.1", "qsgd:bits=4"]
seeds = [0, 1, 2]
precision = "bf16"
"""
TUNED = """
about = "made up"
task = "text"
epochs = 1
methods = ["dense", "vgc:alpha=1"]
rates = [0.5, 1]

[model]
width = 64
"""


def put(folder, name, scores, ratios, n_bytes, column="test_accuracy"):
    """One run: a score and a ratio an epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "epoch": epoch,
            column: score,
            "ratio": ratio,
            "bytes_a_step": sent,
            "dense_bytes_a_step": 4 * PARAMETERS,
            "train_loss": 1.0 / epoch,
            "delay": 10.0 * epoch * (ratio > 1),
            "commit": "abc",
            "torch": "2",
            "hardware": "a machine",
        }
        for epoch, (score, ratio, sent) in enumerate(zip(scores, ratios, n_bytes, strict=True), 1)
    ]
    write(folder / f"{name}.csv", rows)


def write(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def made_up(tmp_path):
    """Dense with three seeds, VGC alpha=1 with two and another that is not finished, alpha=2 and QSGD with one."""
    (tmp_path / "fake.toml").write_text(PLAN, encoding="utf-8")
    folder = tmp_path / "results" / "fake"
    for seed, score in enumerate((0.9, 0.8, 0.88)):
        put(folder, f"sgd-dense-seed{seed}", [0.95, score], [1, 1], [4000, 4000])
    put(folder, "sgd-vgc-alpha-1-seed0", [0.2, 0.85], [10, 40], [200, 100])
    put(folder, "sgd-vgc-alpha-1-seed1", [0.2, 0.86], [math.inf, 50], [8, 100])
    put(folder, "sgd-vgc-alpha-1-seed2", [0.99], [1], [4000])  # one epoch of two
    put(folder, "sgd-vgc-alpha-2-seed0", [0.1, 0.1], [math.inf, math.inf], [8, 8])
    put(folder, "sgd-qsgd-bits-4-seed0", [0.5, 0.89], [1, 1], [30, 30])
    return tmp_path


@pytest.fixture
def tuned(tmp_path):
    """Less is better here; two learning rates each, VGC also with one that came to nothing."""
    (tmp_path / "tuned.toml").write_text(TUNED, encoding="utf-8")
    folder = tmp_path / "results" / "tuned"
    for name, score in {"dense-x0.5": 2.5, "dense": 2.25, "vgc-alpha-1-x0.5": 2.0, "vgc-alpha-1": math.nan}.items():
        put(folder, f"sgd-{name}-seed0", [score], [2], [1000], column="bits_per_byte")
    return tmp_path


def cells(table):
    """The table's rows, by the first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_page_shows_what_the_runs_hold_and_every_picture_it_names_is_there():
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(text, load()), "make results, or .venv/bin/python -m experiments"
    named = set(re.findall(r"\(figures/(results_[^)]*\.svg)\)", text))
    assert named == {path.name for path in FIGURES.glob("results_*.svg")}


def test_a_page_without_the_markers_is_not_written_over():
    with pytest.raises(SystemExit, match="summary:begin"):
        render("<!-- summary:begin -->\n", [])


def test_a_table_has_medians_ranges_and_the_ratio_of_the_whole_run(made_up):
    (results,) = load(made_up)
    (study,) = results.studies
    rows = cells(tables.table(study))
    assert list(rows) == ["`dense`", "`vgc:alpha=1`", "`vgc:alpha=2`", "`qsgd:bits=4`"]
    dense = ["3", "88.00 % (80.00 to 90.00)", "-", "88.00 %", "0.500"]
    assert rows["`dense`"] == [*dense, "-", "1.0", "1.0", "-", "4.0", "1.0"]
    # seed 0: 1 / mean(1/10, 1/40) = 16; seed 1: 1 / mean(0, 1/50) = 100; 150 and 54 bytes a step
    words, sent = f"{4 * PARAMETERS / 58 / 1000:.1f}", "0.1"
    assert study.settings[1].n_bytes == 102
    quality = ["2", "85.50 % (85.00 to 86.00)", "-2.50", "85.50 %", "0.500"]
    assert rows["`vgc:alpha=1`"] == [*quality, "15.0", "58.0", "45.0", words, sent, "39.2"]
    assert rows["`vgc:alpha=2`"][2:8] == ["-78.00", "10.00 %", "0.500", "15.0", "∞", "∞"]
    assert rows["`qsgd:bits=4`"][2:9] == ["+1.00", "89.00 %", "0.500", "-", "1.0", "1.0", "-"]


def test_the_last_tenth_is_a_mean_over_its_epochs():
    rows = [{"test_accuracy": str(epoch / 100)} for epoch in range(1, 31)]
    assert History(rows, []).settled == pytest.approx((28 + 29 + 30) / 3)
    assert History(rows[:11], []).settled == pytest.approx(10.5)


def test_harmonic_means_count_no_elements_where_nothing_was_sent(made_up):
    (results,) = load(made_up)
    first, second = results.studies[0].settings[1].histories
    assert (first.ratio, second.ratio) == pytest.approx((16, 100))


def test_what_is_best_at_its_bytes(made_up):
    (results,) = load(made_up)
    assert "than `qsgd:bits=4` (89.00 %, 0.0 kB) and `vgc:alpha=2` (10.00 %, 0.0 kB)." in tables.best_at_bytes(
        results.studies[0]
    )


def test_runs_that_are_not_finished_are_named_and_not_counted(made_up):
    said = tables.runs(load(made_up))
    assert "7 of 30 runs, a machine, torch 2, commit abc" in said
    left = "`vgc:alpha=1` (seed 2), `vgc:alpha=2` (seeds 1, 2), `strom:tau=0.1`, `qsgd:bits=4` (seeds 1, 2)"
    assert f"Not run: sgd: {left}; adam: all." in said


def test_the_summary_says_who_loses(made_up):
    said = tables.summary(load(made_up))
    assert "worse than Dense in all 2 settings that have run" in said
    assert "is better): all 2 with sgd." in said
    ((name, row),) = cells(said.partition("\n\n")[2]).items()
    closest, failed = "**-2.50** `vgc:alpha=1`, 85.50 %, ratio 58.0", "**-78.00** `vgc:alpha=2`, 10.00 %, ratio ∞"
    assert (name, *row) == ("fake, sgd, 2 epochs", "1 to 3", "88.00 %", closest, failed)


def outdone(folder, n_bytes: float, accuracy: float) -> str:
    """What the summary says of QSGD. Alpha 1 has 85.5 % with 102 bytes, alpha 2 has 10 % with 8."""
    put(folder / "results" / "fake", "sgd-qsgd-bits-4-seed0", [0.5, accuracy], [1, 1], [n_bytes, n_bytes])
    after = tables.summary(load(folder)).partition("as few bytes: ")[2]
    return after.partition(" The table")[0]


def test_the_summary_names_what_is_better_than_every_vgc_with_as_few_bytes(made_up):
    assert outdone(made_up, 200, 0.89) == "`qsgd:bits=4` by 3.50 points (fake, sgd)."
    assert outdone(made_up, 98, 0.89) == "`qsgd:bits=4` by 3.50 points (fake, sgd).", "to 5 %"
    assert outdone(made_up, 97, 0.50) == "`qsgd:bits=4` by 40.00 points (fake, sgd).", "alpha 1 sends more"
    assert outdone(made_up, 98, 0.85) == "", "alpha 1 is better"
    assert outdone(made_up, 7, 0.89) == "", "every VGC sends more"


def test_fewer_bits_per_byte_are_better_and_every_method_has_its_best_learning_rate(tuned):
    every = load(tuned)
    (study,) = every[0].studies
    rows = cells(tables.table(study))
    assert rows["`dense x0.5`"][1:3] == ["2.5000 bits", "+0.2500"]
    assert rows["**`dense`**"][1:3] == ["2.2500 bits", "-"]
    assert rows["**`vgc:alpha=1 x0.5`**"][1:3] == ["2.0000 bits", "-0.2500"]
    assert rows["`vgc:alpha=1`"][1:3] == ["diverged", "-"]
    said = tables.summary(every)
    assert "worse than Dense in 0 of the 1 settings" in said
    assert "| **-0.2500** `vgc:alpha=1 x0.5`, 2.0000 bits, ratio 2.0 | - |" in said


def test_without_momentum_the_distance_is_to_the_best_dense_of_both(tuned):
    also = '\n[[also]]\noptimizers = ["plain", "adam"]\nmethods = ["vgc:alpha=1"]\n'
    (tuned / "tuned.toml").write_text(TUNED + also, encoding="utf-8")
    for name in ("plain-vgc-alpha-1-seed0", "adam-vgc-alpha-1-seed0"):
        put(tuned / "results" / "tuned", name, [2.5], [2], [1000], column="bits_per_byte")
    studies = {study.optimizer: study for study in load(tuned)[0].studies}
    assert cells(tables.table(studies["plain"]))["`vgc:alpha=1`"][1:3] == ["2.5000 bits", "+0.2500"]
    assert studies["plain"].dense == studies["sgd"].dense
    assert studies["adam"].dense is None


def test_a_falling_density_is_a_row_of_its_own_and_its_missing_rates_are_named(tmp_path):
    plan = TUNED.replace('"vgc:alpha=1"', '"vgc:density=0.1"').replace("rates =", "fronts = [0, 3]\nrates =")
    (tmp_path / "tuned.toml").write_text(plan, encoding="utf-8")
    for name in ("dense", "vgc-density-0.1", "vgc-density-0.1-front3-x0.5"):
        put(tmp_path / "results" / "tuned", f"sgd-{name}-seed0", [2.0], [2], [1000], column="bits_per_byte")
    every = load(tmp_path)
    rows = cells(tables.table(every[0].studies[0]))
    assert list(rows) == ["`dense`", "`vgc:density=0.1`", "`vgc:density=0.1 front=3 x0.5`"]
    assert "3 of 6 runs" in tables.runs(every)
    assert "`dense x0.5`, `vgc:density=0.1 x0.5`, `vgc:density=0.1 front=3`." in tables.runs(every)


def test_a_variant_without_a_run_at_any_rate_is_named_once(tuned):
    for path in (tuned / "results" / "tuned").glob("sgd-vgc*"):
        path.unlink()
    assert "Not run: sgd: `vgc:alpha=1` at every rate." in tables.runs(load(tuned))


def test_only_what_the_file_asks_for_is_missed(tuned):
    also = '\n[[also]]\nmethods = ["vgc:alpha=1"]\nrates = [0.5, 4]\nseeds = [0, 1]\n'
    (tuned / "tuned.toml").write_text(TUNED.replace("rates = [0.5, 1]\n", "") + also, encoding="utf-8")
    every = load(tuned)
    assert list(cells(tables.table(every[0].studies[0]))) == ["**`dense`**", "`vgc:alpha=1`", "**`vgc:alpha=1 x0.5`**"]
    assert "Not run: sgd: `vgc:alpha=1 x0.5` (seed 1), `vgc:alpha=1 x4`." in tables.runs(every)


MARKED = ("summary", "runs", "local-variance", "experiments")  # what of the page is made


def test_nothing_run_is_no_error(tmp_path):
    (tmp_path / "fake.toml").write_text(PLAN, encoding="utf-8")
    text = "".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->\n" for name in MARKED)
    page = render(text, load(tmp_path))
    assert "Nothing is known yet" in page
    assert "0 of 30 runs. Not run: sgd: all; adam: all." in page
    assert "###" not in page


def test_every_method_has_a_look_of_its_own():
    looks = plots.styles(load())
    assert len({(look.color, look.dash) for look in looks.values()}) == len(looks)


def test_a_panel_has_at_most_eight_lines_and_dense_is_in_all():
    methods = ["dense", *(f"vgc:alpha={n}" for n in range(17)), "vgc:alpha=1,tau=1", "strom:tau=1", "strom:tau=2"]
    groups = plots.panels([Setting(method, 1.0, ()) for method in methods])
    assert all(group[0].method == "dense" and len(group) <= 8 for group in groups)
    assert [setting.method for group in groups for setting in group[1:]] == methods[1:]


def test_the_picture_of_layers_has_elements_of_the_tensor_by_elements_sent(tuned):
    pytest.importorskip("matplotlib")
    (results,) = load(tuned)
    sizes = plots.numels(results.plan)
    sent = {name: size / 8 for name, (size, _) in sizes.items()} | {"positions.weight": 0, "head.weight": 1}
    write(tuned / "results" / "tuned" / "sgd-vgc-alpha-1-x0.5-seed0.layers.csv", [{"epoch": 1, **sent}])
    drawn = plots.pictures(load(tuned))["tuned sgd"]
    (axes,) = drawn["results_tuned_sgd_layers.svg"]().axes
    matrices, vectors = (list(line.get_ydata()) for line in axes.lines[-2:])
    assert vectors == [8.0] * len(vectors)
    assert math.isnan(matrices[1])
    assert matrices[0] == 8.0
    assert matrices[-1] == sizes["head.weight"][0]


def test_committed_runs_say_where_they_come_from_and_name_no_folder():
    for results in load():
        for history in results.finished.values():
            assert len(history.layers) == len(history.rows)
            for row in history.rows:
                assert row["command"].startswith("gradwire experiment ")
                assert all(row[name] for name in ("commit", "gradwire", "torch", "python"))
                assert "/" not in row["command"] + row["hardware"]


def test_sizes_of_tensors_are_those_of_the_network_of_the_file(tuned):
    (results,) = load(tuned)
    sizes = plots.numels(results.plan)
    assert sizes["tokens.weight"] == (256 * 64, True)
    paper = next(each.plan for each in load() if each.plan.task == "cifar10")
    assert sum(size for size, _ in plots.numels(paper).values()) == 14_987_200


def test_pictures_of_the_same_runs_are_the_same_bytes(made_up, tuned, tmp_path):
    pytest.importorskip("matplotlib")
    every = load(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "results_of_old.svg").touch()
    for name in ("one", "two"):
        plots.write(every, tmp_path / name)
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert set(drawn) == {
        f"results_{name}.svg"
        for name in (
            "fake_bytes",
            "fake_sgd_score",
            "fake_sgd_ratio",
            "tuned_bytes",
            "tuned_sgd_score",
            "tuned_sgd_ratio",
        )
    }
