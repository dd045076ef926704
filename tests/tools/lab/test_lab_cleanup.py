"""A lab leaves nothing behind: no namespace, no process, however its own process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transfers import needs_namespaces, python

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab import Lab, LabError, clean, namespaces

pytestmark = [needs_namespaces, pytest.mark.alone]

HOLD = """
import sys, time
from gradwire.tools.lab import Lab
with Lab(hosts=2, rate=10) as lab:
    process = lab.start(1, ["sleep", "100"])
    orphan = lab.start(0, ["sh", "-c", "sleep 100 & echo $!"], stdout=-1, text=True)
    print(process.pid, orphan.stdout.readline().strip(), *lab.names, lab.bridge, flush=True)
    time.sleep(100)
"""


def there(names: list[str]) -> list[str]:
    return [name for name in names if (namespaces.FOLDER / name).exists()]


def all_of(lab: Lab) -> list[str]:
    return [*lab.names, lab.bridge]


def test_a_lab_is_gone_after_its_block():
    with Lab(hosts=3) as lab:
        names = all_of(lab)
        assert there(names) == names
        assert lab.names == [f"gradwire-{os.getpid()}-{name.split('-')[2]}" for name in lab.names]
        process = lab.start(2, ["sleep", "100"])
    assert there(names) == []
    assert process.returncode == -signal.SIGKILL
    lab.close()


def test_hosts_see_each_other_and_nothing_else():
    script = (
        "import socket; print([name for _, name in socket.if_nameindex()], open('/proc/net/route').read().count('\\n'))"
    )
    with Lab(hosts=2, rate=10) as lab:
        shown = lab.start(0, python(script), stdout=subprocess.PIPE, text=True).communicate()[0]
    assert shown == "['lo', 'eth0'] 2\n"  # a head and one route, to the lab's own network


def test_two_labs_of_one_process_have_names_of_their_own():
    with Lab(hosts=2, rate=10) as one, Lab(hosts=2, rate=10) as two:
        assert not set(all_of(one)) & set(all_of(two))
        assert clean() == []
        assert there(all_of(one) + all_of(two)) == all_of(one) + all_of(two)


class OwnError(Exception):
    pass


def test_a_lab_is_gone_after_an_exception():
    labs = []

    def work() -> None:
        with Lab(hosts=2, rate=10) as lab:
            labs.append((lab, lab.start(0, ["sleep", "100"])))
            raise OwnError

    with pytest.raises(OwnError):
        work()
    ((lab, process),) = labs
    assert there(all_of(lab)) == []
    assert process.poll() is not None


@pytest.mark.parametrize("error", [LabError("tc has failed"), KeyboardInterrupt()])
def test_a_lab_that_cannot_be_finished_is_gone(error, monkeypatch):
    def fail(*words: object) -> None:
        assert len(list(namespaces.FOLDER.glob(f"gradwire-{os.getpid()}-*"))) == 3
        raise error

    monkeypatch.setattr(namespaces, "_shape", fail)
    with pytest.raises(type(error)):
        Lab(hosts=2, rate=10)
    assert not list(namespaces.FOLDER.glob(f"gradwire-{os.getpid()}-*"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_interrupt_does_not_stop_the_cleaning(monkeypatch):
    real, calls = namespaces.remove, []

    def interrupted(names: list[str]) -> None:
        calls.append(names)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(names)

    lab = Lab(hosts=2, rate=10)
    monkeypatch.setattr(namespaces, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.close()
    assert there(all_of(lab)) == []


def hold() -> tuple[subprocess.Popen[str], list[int], list[str]]:
    """A process with a lab: itself, what runs in its hosts, and its namespaces."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD], text=True, start_new_session=True, **pipes)
    assert process.stdout is not None
    first, second, *names = process.stdout.readline().split()
    assert there(names) == names
    assert len(names) == 3
    return process, [int(first), int(second)], names


def gone(pids: list[int]) -> bool:
    return not [pid for pid in pids if namespaces.runs(pid)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_lab_is_gone_after_a_signal(number, code):
    process, pids, names = hold()
    os.killpg(process.pid, number)  # as a terminal does it
    process.communicate(timeout=20)
    assert process.returncode == code
    assert there(names) == []
    assert gone(pids)


def test_what_a_killed_lab_leaves_is_removed_by_the_next():
    process, pids, names = hold()
    with Lab(hosts=2, rate=10) as beside:  # a lab whose process runs is nobody's business
        assert there(names) == names
        process.kill()
        time.sleep(0.1)  # not waited for: it stays a zombie
        assert there(names) == names
        assert not gone(pids)
        assert clean() == sorted(names)
        assert there(all_of(beside)) == all_of(beside)
    assert there(names) == []
    assert gone(pids)
    process.communicate()


def test_the_next_lab_cleans_by_itself():
    name = "gradwire-4194305-0"  # no process has this number: it is above Linux's largest
    subprocess.run(["ip", "netns", "add", name], check=True)
    foreign = "gradwire-4194305"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    try:
        with Lab(hosts=1, rate=10):
            assert there([name, foreign]) == [foreign]
    finally:
        subprocess.run(["ip", "netns", "delete", foreign], check=True)


def test_a_lab_takes_the_place_of_a_killed_one_whose_process_had_its_number():
    with Lab(hosts=1, rate=10) as lab:
        following = f"gradwire-{os.getpid()}-{int(lab.names[0].split('-')[2]) + 1}"
    subprocess.run(["ip", "netns", "add", following], check=True)
    with Lab(hosts=1, rate=10) as lab:
        assert lab.names == [following]
    assert there([following]) == []


def test_nothing_starts_after_an_error_in_the_input():
    before = set(Path(namespaces.FOLDER).glob("*"))
    with pytest.raises(InputError):
        Lab(hosts=2, rate=[10, 0])
    assert set(Path(namespaces.FOLDER).glob("*")) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
