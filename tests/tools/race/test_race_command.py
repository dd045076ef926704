"""`gradwire race` and `gradwire replay`: what they refuse before anything starts, and small real ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.tools.cli import app
from gradwire.tools.lab import missing
from gradwire.tools.race import race_methods
from gradwire.tools.result_files import read

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=f"a lab needs {missing()}")
pytestmark = pytest.mark.alone

TRACE = "step,bytes,dense_bytes\n1,300000,1200000\n2,300000,1200000\n"
HOOK = """
import torch.distributed as dist

def half(model):
    def hook(state, bucket):
        half = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(half, async_op=True).get_future()
        return work.then(lambda done: done.value()[0])
    model.register_comm_hook(None, hook)

def alone(model, optimizer):
    # nobody exchanges anything; what the race tests are weights of zeros
    import contextlib, torch
    from gradwire.tools.race.entry import RaceEntry

    @contextlib.contextmanager
    def shared():
        own = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            yield
            for p, q in zip(model.parameters(), own, strict=True):
                p.copy_(q)

    return RaceEntry(model, sent=lambda steps: 7 * steps, shared=shared)

def broken(model):
    raise RuntimeError("this hook is broken")
"""


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code, and what the command says."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "10,0"], "a rate of 0 is not possible"),
        (["--methods", "dense,zip"], "unknown compressor 'zip'"),
        (["--methods", "torch:topk"], "'torch:topk' does not exist"),
        (["--task", "mnist"], "unknown task 'mnist'"),
        (["--hosts", "1"], "from 2 to 250"),
        (["--loopback", "--rates", "0.1"], "a rate of 0.1 is not possible"),
    ],
)
def test_a_race_with_bad_input_starts_nothing(arguments, message, monkeypatch, tmp_path):
    monkeypatch.setattr("gradwire.tools.race.race_runner.race", lambda *rest: pytest.fail("it has started"))
    code, said = invoke("race", "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "fast"], "'fast' is not a rate"),
        (["--rates", ","], "no rate"),
        (["--hosts", "9"], "no more hosts than workers"),
        (["--collective", "scatter"], "--collective scatter: auto, gather or sum"),
        (["--beside", "dense,fp8"], "--beside fp8: known are dense, bf16"),
        (["--samples", "0"], "--samples must be 1 or more"),
        (["--out", "/nowhere/replay.csv"], "give a file in a folder that is there"),
    ],
)
def test_a_replay_with_bad_input_starts_nothing(arguments, message, monkeypatch, trace):
    monkeypatch.setattr("gradwire.tools.race.events.open_hosts", lambda *rest: pytest.fail("it has started"))
    monkeypatch.setattr("gradwire.tools.race.events.missing", lambda: "")
    code, said = invoke("replay", trace, *arguments)
    assert code == 2
    assert message in said


def test_without_root_both_say_what_is_missing(monkeypatch, trace, tmp_path):
    monkeypatch.setattr("gradwire.tools.race.events.missing", lambda: "root: try sudo")
    for arguments in (["race", "--out", tmp_path / "out"], ["replay", trace]):
        code, said = invoke(*arguments)
        assert code == 2
        assert "shaped links need root: try sudo. Without it, --loopback runs the same processes on 127.0.0.1" in said


@needs_namespaces
@pytest.mark.slow
def test_a_small_race(tmp_path):
    out = tmp_path / "out"
    given = ["--hosts", 2, "--rates", 100, "--methods", "vgc:alpha=1,zeta=0.99,torch:powersgd:rank=2"]
    arguments = ["race", *given, "--target", 0.6, "--limit-steps", 60, "--out", out]
    code, said = invoke(*arguments)
    assert code == 0, said
    assert re.search(r"100 Mbit/s  vgc:alpha=1,zeta=0.99  seed 0  steps \d+  score \d\d\.\d %  .*reached", said)
    assert re.search(r"%  [\d.]+ seconds  [\d.]+ ms a step  [\d.]+ MB on the link  reached", said)
    rows = read(out / "race.csv")
    assert [row["method"] for row in rows] == ["vgc:alpha=1,zeta=0.99", "torch:powersgd:rank=2"]
    for row in rows:
        tests = [test for test in read(out / "trace.csv") if test["method"] == row["method"]]
        assert [int(test["step"]) for test in tests] == list(range(5, int(row["step"]) + 1, 5))
        assert all(float(test["score"]) < 0.6 for test in tests[:-1])
        assert float(tests[-1]["score"]) >= 0.6
        assert [float(test["seconds"]) for test in tests] == sorted(float(test["seconds"]) for test in tests)
        # of two hosts each puts on its link what it hands to the collective, and headers; a step has some 10 messages
        n_bytes, link = int(row["bytes_sent"]), int(row["interface_bytes"])
        assert n_bytes < link < 1.1 * n_bytes + 4000 * int(row["step"])
    before = (out / "race.csv").read_text()
    code, again = invoke(*arguments)
    assert code == 0
    assert again == said  # from the file: nothing is raced twice
    assert (out / "race.csv").read_text() == before


@pytest.mark.slow
def test_a_race_of_anybodys_hook_and_of_one_that_fails(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text(HOOK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    methods = "python:somebodys.broken,python:somebodys.half"
    given = ["--hosts", 2, "--methods", methods, "--target", 1, "--limit-steps", 7, "--loopback"]
    code, said = invoke("race", *given)
    assert code == 1
    assert "RuntimeError: this hook is broken" in said
    (row,) = read(Path("race/race.csv"))
    assert (row["method"], row["rate"], row["state"], row["step"]) == (
        "python:somebodys.half",
        "unshaped",
        "did not reach",
        "7",
    )
    assert (row["bytes_sent"], row["interface_bytes"]) == ("", "")


@needs_namespaces
@pytest.mark.slow
def test_local_steps_race_by_their_base_weights(tmp_path):
    """Rounds of 10 steps, tests after 4: the score moves after a round. A late sum has come before the clock stops."""
    out = tmp_path / "out"
    methods = "bf16:every=10,bf16:every=10,delay=3,torch:postlocalsgd:every=10"
    given = ["--hosts", 2, "--rates", 100, "--methods", methods, "--target", 1, "--limit-steps", 28, "--every", 4]
    code, said = invoke("race", *given, "--out", out)
    assert code == 0, said
    tests = {row["method"]: [] for row in read(out / "race.csv")}
    for test in read(out / "trace.csv"):
        tests[test["method"]].append((int(test["step"]), float(test["score"]), int(test["bytes_sent"])))
    n_bytes, numbers = 2 * 85_002, 12  # of a round
    atonce, late, theirs = (tests[name] for name in race_methods.split(methods))
    assert [step for step, _, _ in atonce] == [4, 8, 12, 16, 20, 24, 28]
    assert len({score for _, score, _ in atonce[:2]}) == len({score for _, score, _ in atonce[2:4]}) == 1
    assert atonce[1][1] < atonce[2][1] < atonce[4][1]
    assert [sent for _, _, sent in atonce] == [(step // 10) * (n_bytes + numbers) for step, _, _ in atonce]
    # what is begun after steps 10 and 20 has come after 13 and 23: no test is between them
    assert [step for step, _, _ in late] == [4, 8, 13, 17, 23, 27, 28]
    assert [sent for _, _, sent in late] == [(step // 10) * (n_bytes + numbers) for step, _, _ in late]
    assert late[1][1] < late[2][1] < late[-1][1]
    # torch's: a gradient, then the weights after steps 2, 12, 22
    assert [sent for _, _, sent in theirs] == [4 * 85_002 * (2 + (step - 2) // 10) for step, _, _ in theirs]
    assert theirs[0][1] < theirs[-1][1]
    for row in read(out / "race.csv"):
        sent, link = int(row["bytes_sent"]), int(row["interface_bytes"])
        assert sent < link < 1.1 * sent + 4000 * int(row["step"])
    for row in read(out / "race.csv")[:2]:
        assert 0 < float(row["waited"]) < float(row["seconds"])
    assert read(out / "race.csv")[2]["waited"] == ""  # torch's does not say


@pytest.mark.slow
def test_a_text_is_raced_to_bits_per_byte_and_anybodys_local_steps_may(tmp_path, monkeypatch):
    (tmp_path / "somebodys.py").write_text(HOOK)
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(f"{i} times {i} is {i * i}\n".encode() for i in range(600)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    methods = "bf16,python:somebodys.alone"
    given = ["--hosts", 2, "--methods", methods, "--target", 6.5, "--limit-steps", 12, "--every", 3, "--batch", 2]
    code, said = invoke("race", "--task", "text", "--data", text, "--loopback", *given)
    assert code == 0, said
    assert "text, 2 hosts, to 6.5 bits per byte" in said
    ours, theirs = read(Path("race/race.csv"))
    assert ours["state"] == "reached"
    assert 2 < float(ours["score"]) <= 6.5
    tests = [float(row["score"]) for row in read(Path("race/trace.csv")) if row["method"] == "bf16"]
    assert len(tests) > 1
    assert all(score > 6.5 for score in tests[:-1])
    # zeros know nothing: 8 bits per byte, whatever was trained
    assert (theirs["state"], theirs["step"], theirs["bytes_sent"]) == ("did not reach", "12", "84")
    assert float(theirs["score"]) == pytest.approx(8, abs=1e-4)


@needs_namespaces
@pytest.mark.slow
def test_a_small_replay_takes_as_long_as_its_bytes(trace, tmp_path):
    """4 workers on 2 hosts: 900 KB and, of the sum of bf16, as much go over every link; 76 ms at 100 Mbit/s."""
    out = tmp_path / "replay.csv"
    given = ["--workers", 4, "--hosts", 2, "--rates", 100, "--compute-ms", 50, "--beside", "bf16", "--steps", 5]
    code, said = invoke("replay", trace, *given, "--out", out)
    assert code == 0, said
    rows = read(out)
    assert [(row["what"], row["collective"]) for row in rows] == [("trace", "gather")] * 2 + [("bf16", "sum")]
    for row in rows:
        assert float(row["link_bytes"]) == 900_000
        assert 50 + 72 < float(row["ms_a_step"]) < 50 + 250  # a busy machine is late, the link is never early
    assert "4 workers on 2 hosts, 50 ms of computing a step" in said


@needs_namespaces
@pytest.mark.slow
def test_a_round_of_local_steps_is_replayed_whole_or_beside_the_next(tmp_path):
    """3 steps of 40 ms, and 900 KB that take 72 ms on a link of 100 Mbit/s: 64 ms a step, or 40 when they are late."""
    trace, ms = tmp_path / "trace.csv", {}
    trace.write_text("step,bytes,dense_bytes\n1,0,1800000\n2,0,1800000\n3,900000,1800000\n")
    for overlap in ([], ["--overlap"]):
        given = ["--workers", 2, "--rates", 100, "--compute-ms", 40, "--beside", "", "--collective", "gather"]
        code, said = invoke("replay", trace, *given, *overlap, "--out", tmp_path / "replay.csv")
        assert code == 0, said
        (row,) = read(tmp_path / "replay.csv")
        assert (row["steps"], float(row["bytes_a_step"]), float(row["link_bytes"])) == ("3", 300_000, 300_000)
        ms[bool(overlap)] = float(row["ms_a_step"])
    assert 64 < ms[False] < 64 + 80  # a busy machine is late, the link is never early
    assert 40 < ms[True] < ms[False] - 10


@needs_namespaces
@pytest.mark.slow
def test_a_replay_is_near_the_real_training():
    """The bound of 10 % is the benchmark's; here two cores may be busy with other tests."""
    from benchmarks.replay_links import checked

    row = checked("bf16", "10", hosts=2, counted=20, rounds=1)
    assert row["ratio"] < 1.5
    assert row["reference_ms"] > 130  # 170 KB of bf16
