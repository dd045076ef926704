"""`gradwire lab`: the command line, its table, its errors and its exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transfers import needs_namespaces, python
from typer.testing import CliRunner

from gradwire.tools.cli import app
from gradwire.tools.input_errors import InputError
from gradwire.tools.lab import namespaces
from gradwire.tools.lab.commands import Change, find_program
from gradwire.tools.lab.rates import Link

pytestmark = pytest.mark.alone

SHOW = """
import os
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
print("host", *[os.environ[name] for name in names], os.environ["OMP_NUM_THREADS"], os.environ["OMP_THREAD_LIMIT"])
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] != "1":
    time.sleep(100)
print("something is wrong", flush=True)
sys.exit(7)
"""
FAIL_AS_A_WORKER = """
import json, os, sys, time
if os.environ["RANK"] == "1":
    extra = {"py_callstack": "the line\\nof the error", "timestamp": "0", "time": 1.0}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "no such task", "extraInfo": extra}}, file)
    sys.exit(1)
time.sleep(100)
"""


def invoke(*arguments: object) -> tuple[int, str]:
    """Exit code, and what the command itself says."""
    result = CliRunner().invoke(app, ["lab", *map(str, arguments)], env={"COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@needs_namespaces
def test_a_command_runs_once_a_host_and_a_table_follows(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    code, said = invoke("--hosts", 2, "--rate", "100,10/5", "--", *python(SHOW))
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert code == 0
    assert capfd.readouterr().out == f"host 0 2 0 1 10.213.0.1 eth0 {threads} {threads}\n"  # of host 0 alone
    assert "│    0 │ 10.213.0.1 │ 100 Mbit/s" in said
    assert "│    1 │ 10.213.0.2 │ 10 Mbit/s up, 5 Mbit/s down" in said
    assert not list(namespaces.FOLDER.glob(f"gradwire-{os.getpid()}-*"))


@needs_namespaces
def test_the_first_host_that_fails_is_shown_and_ends_the_others():
    begin = time.monotonic()
    code, said = invoke("--hosts", 3, "--", *python(FAIL))
    assert time.monotonic() - begin < 5
    assert code == 7
    assert said.endswith("gradwire: host 1 failed with exit code 7; its last lines:\n    something is wrong\n")
    assert "10.213.0.3" in said  # the table comes before


@needs_namespaces
def test_the_error_that_a_worker_leaves_for_torchrun_is_shown():
    code, said = invoke("--hosts", 2, "--", *python(FAIL_AS_A_WORKER))
    assert code == 1
    assert said.endswith("gradwire: worker 1 failed: no such task\n    the line\n    of the error\n")


@needs_namespaces
def test_a_host_that_a_signal_ends():
    code, said = invoke("--hosts", 1, "--", "sh", "-c", "kill -9 $$")
    assert code == 128 + signal.SIGKILL
    assert said.endswith("gradwire: host 0 was ended by SIGKILL\n")


@needs_namespaces
def test_changes_come_when_they_are_due():
    code, said = invoke("--hosts", 2, "--rate", 5, "--change", "0.5s:1Gbit,30", "--change", "0.1:7", "--", "sleep", 0.8)
    assert code == 0
    assert [re.split(" *│ *", line)[3] for line in said.splitlines() if "10.213" in line] == [
        "1000 Mbit/s",
        "30 Mbit/s",
    ]
    _, said = invoke("--hosts", 2, "--rate", 5, "--change", "0.5s:1Gbit,30", "--change", "0.1:7", "--", "sleep", 0.3)
    assert said.count("7 Mbit/s") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0", "--", "true"], "a rate of 0 is not possible"),
        (["--rate", "fast", "--", "true"], "'fast' is not a rate"),
        (["--rate", "10,10", "--", "true"], "2 rates for 4 hosts"),
        (["--change", "10", "--", "true"], "--change 10: give seconds and a rate"),
        (["--change", "-1s:10", "--", "true"], "--change -1s:10: give seconds and a rate"),
        (["--change", "1s:0", "--", "true"], "a rate of 0 is not possible"),
        (["--hosts", "0", "--", "true"], "0 hosts"),
        (["--hosts", "0", "--loopback", "--", "true"], "0 hosts: from 1 to 250 are possible"),
        (["--hosts", "0", "--rate", "10,20", "--", "true"], "0 hosts: from 1 to 250 are possible"),
        (["--rate", "10"], "no command"),
        (["--", "no-such-command"], "there is no command 'no-such-command'"),
        (["--loopback", "--rate", "0.1", "--", "true"], "a rate of 0.1 is not possible"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(arguments, message):
    code, said = invoke(*arguments)
    assert code == 2
    assert message in said
    assert said.startswith("gradwire: error: ")
    assert "Traceback" not in said


def test_without_root_the_loopback_is_offered(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "find", lambda name: None)
    code, said = invoke("--rate", 10, "--", "true")
    assert code == 2
    assert "needs the command ip (package iproute2), the command tc (package iproute2), root: try sudo" in said
    assert "--loopback` runs the same processes on 127.0.0.1, unshaped" in said
    assert invoke("--clean")[0] == 2


def test_the_loopback_runs_the_same_processes(capfd, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, said = invoke("--hosts", 2, "--rate", 10, "--loopback", "--", *python(SHOW))
    assert code == 0
    assert capfd.readouterr().out.startswith("host 0 2 0 1 127.0.0.1 lo ")
    assert "unshaped" in said
    code, said = invoke("--hosts", 3, "--loopback", "--", *python(FAIL))
    assert code == 7
    assert "something is wrong" in said


def test_what_the_user_of_a_command_can_mend_is_one_line():
    gradwire = [sys.executable, "-m", "gradwire", "train", "--compressor", "zip"]
    code, said = invoke("--hosts", 2, "--loopback", "--", *gradwire)
    assert code == 2
    assert said.splitlines()[-1].startswith("gradwire: error: --compressor zip: unknown compressor 'zip'; known: dense")
    assert len(said.splitlines()) == 2  # that it is unshaped, and this


@needs_namespaces
def test_clean_names_what_it_removes():
    name = "gradwire-4194306-3"  # no process has this number: it is above Linux's largest
    subprocess.run(["ip", "netns", "add", name], check=True)
    code, said = invoke("--clean")
    assert code == 0
    assert name in said
    assert not (namespaces.FOLDER / name).exists()


@needs_namespaces
def test_training_in_a_lab_and_the_key_that_ends_it(tmp_path: Path):
    """The first steps of a real run; then Ctrl-C: one line, no process, no namespace."""
    train = [
        "gradwire",
        "train",
        "--epochs",
        "1000",
        "--steps-per-epoch",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "gradwire", "lab", "--hosts", "2", "--rate", "50", "--", *train]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    assert process.stdout is not None
    assert "epoch 1/1000" in process.stdout.readline()
    names = list(namespaces.FOLDER.glob(f"gradwire-{process.pid}-*"))
    assert len(names) == 3
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "gradwire: interrupted.\n"
    assert not [name for name in names if name.exists()]


def test_programs_are_found_beside_this_python(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_program([Path(sys.executable).name]).endswith(Path(sys.executable).name)
    with pytest.raises(InputError, match="there is no command 'no-such-command'"):
        find_program(["no-such-command"])


def test_changes_are_links():
    from gradwire.tools.cli.lab_command import parse_change

    assert parse_change("10s:20", 2) == Change(10, [Link(20, 20)] * 2)
    assert parse_change("1.5:unlimited,10/5", 2) == Change(1.5, [Link(None, None), Link(10, 5)])
