"""Traffic adds up, and the files say what was measured."""

import csv
import json
from pathlib import Path

from gradwire.state.durable_files import write_atomic
from gradwire.tools.result_files import json_text
from gradwire.tools.train.metrics import RunState, Traffic, columns, write_csv


def test_traffic_adds() -> None:
    early = Traffic(2, 100, 300, 800, 50, 1.0, 2.0, 3.0)
    late = Traffic(2, 300, 900, 800, 150, 3.0, 6.0, 1.0)
    assert early + late == Traffic(4, 400, 1200, 1600, 200, 4.0, 8.0, 4.0)
    row = (early + late).per_step(parameters=100)
    assert row["ratio"] == 100 * 4 / 200
    assert row["bits_per_parameter"] == 8 * 400 / (4 * 100)
    assert (row["encode_ms"], row["exchange_ms"], row["decode_ms"]) == (1.0, 2.0, 1.0)
    assert Traffic().per_step(100)["ratio"] == float("inf"), "nothing sent"


def test_a_standing_survives_being_written_down() -> None:
    state = RunState(epoch=1, step=9, position=64, loss_sum=0.1, traffic=Traffic(steps=3), rows=[{"epoch": 1}])
    again = RunState.from_plain(json.loads(json.dumps(state.to_plain())))
    assert again == state
    again.next_epoch({"epoch": 2})
    assert (again.epoch, again.step, again.position, again.total.steps, len(again.rows)) == (2, 9, 0, 3, 2)


def test_files(tmp_path: Path) -> None:
    names = columns(["test_accuracy"])
    row = {name: float(index) for index, name in enumerate(names)} | {"ratio": float("inf")}
    write_csv(tmp_path / "metrics.csv", [row, row], ["test_accuracy"])
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert {key: float(value) for key, value in rows[1].items()} == row
    write_atomic(tmp_path / "summary.json", json_text({"a": float("inf"), "b": {"c": 1.5}}))
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": None, "b": {"c": 1.5}}
    assert len(list(tmp_path.iterdir())) == 2, "nothing temporary is left"
