"""How GPU tests are found, run and logged; no GPU is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpu

TESTS = Path(__file__).parent


def test_there_is_one_way_to_ask_for_a_gpu() -> None:
    """By the marker: what is skipped in another way is not in the log either."""
    asking = re.compile(r"cuda\.is_" r"available\(|skipif\(.*(cuda|gpu)", re.IGNORECASE)
    assert not [path.name for path in TESTS.rglob("test_*.py") if asking.search(path.read_text(encoding="utf-8"))]


def test_without_a_gpu_it_says_so_and_the_log_stays() -> None:
    before = logged()
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=gpu.ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "The GPU tests need a CUDA device, and torch finds none here. Their log stays as it is.\n"
    assert logged() == before


def logged() -> str:
    return gpu.LOG.read_text() if gpu.LOG.exists() else "nothing yet"


SAMPLE = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    raise ValueError("no fixture")

@pytest.mark.parametrize("number", [1, 2])
def test_sum(number):
    assert 1 + number == 2

def test_skipped():
    pytest.skip("made for Hopper")

def test_without(broken):
    pass
"""


ELSEWHERE = """
import sys, torch
from pathlib import Path
from tests import gpu

torch.cuda.is_available = lambda: True
gpu.ROOT = Path(sys.argv[1])
gpu.LOG = gpu.ROOT / "log"
gpu.head = lambda arguments: ["gradwire " + "a" * 40, "a device"]
sys.exit(gpu.run([]))
"""


def test_the_log_has_every_test_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_configure(config): config.addinivalue_line('markers', 'gpu: -')")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "tests" / "test_cannot.py").write_text("import pytest, nothing_of_this_name  # mark.gpu")
    (tmp_path / "tests" / "test_whole.py").write_text("import pytest\npytest.importorskip('none_such')  # mark.gpu")
    (tmp_path / "tests" / "test_other.py").write_text("import nothing_of_this_name")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], cwd=gpu.ROOT, capture_output=True)
    assert done.returncode == 1
    assert (tmp_path / "log").read_text().splitlines() == [
        "gradwire " + "a" * 40,
        "a device",
        "ERROR tests/test_cannot.py E   ModuleNotFoundError: No module named 'nothing_of_this_name'",
        "ERROR tests/test_sample.py::test_without E       ValueError: no fixture",
        "FAILED tests/test_sample.py::test_sum[2] E       assert (1 + 2) == 2",
        "PASSED tests/test_sample.py::test_sum[1]",
        "SKIPPED tests/test_sample.py::test_skipped Skipped: made for Hopper",
        "SKIPPED tests/test_whole.py Skipped: could not import 'none_such': No module named 'none_such'",
        "2 error, 1 failed, 1 passed, 2 skipped",
    ]


BARE = """
import sys, torch
from pathlib import Path
from tests import gpu

for name in ("hypothesis", "llvmlite", "numba", "pytest_timeout", "rich", "sklearn", "transformers", "typer", "xdist"):
    sys.modules[name] = None  # as if it were not installed
torch.cuda.is_available = lambda: True
torch.cuda.get_device_name = lambda: "a device"
gpu.LOG = gpu.ROOT / sys.argv[1]
sys.exit(gpu.run(["--collect-only"]))
"""


def test_no_more_is_needed_than_torch_triton_and_pytest(tmp_path: Path) -> None:
    """A machine that is lent with a GPU may have nothing else, and nowhere to get it from."""
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", BARE, str(tmp_path / "log")]
    done = subprocess.run(command, cwd=gpu.ROOT, env=alone, capture_output=True, text=True)
    assert (tmp_path / "log").read_text().splitlines()[3:] == [""], "a file that cannot be imported"
    assert done.returncode == 0, done.stdout
    for name in gpu.marked_files():
        if name != "tests/test_gpu_tests.py":
            assert f"{name}::" in done.stdout


@pytest.mark.parametrize(
    ("name", "meets"),
    [
        ("src/gradwire/exchange/courier.py", True),
        ("src/gradwire/moments/torch_compile/layer_operator.py", True),  # torch.compile
        ("src/gradwire/codec/gpu/encode.py", True),
        ("src/gradwire/codec/cpu/encode.py", False),
        ("src/gradwire/codec/cpu/decode.py", False),
        ("src/gradwire/codec/cpu/pack.py", False),
        ("src/gradwire/tools/cli/plan_command.py", False),
    ],
)
def test_what_a_gpu_can_meet(name: str, meets: bool) -> None:
    assert (gpu.ROOT / name).exists()
    assert bool(gpu.NO_GPU.search(name)) != meets


def test_changes_since_the_log_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "LOG", tmp_path / "log")
    assert "names no commit" in gpu.since()

    def write(name: str, text: str) -> None:
        path = tmp_path / "src" / "gradwire" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit() -> None:
        me = ["-c", "user.name=me", "-c", "user.email=me@here"]
        assert gpu.git("add", "src") is not None
        assert gpu.git(*me, "commit", "-qm", "a change") is not None

    (tmp_path / "log").write_text("gradwire unknown\n")
    assert "names no commit" in gpu.since()
    (tmp_path / "log").write_text(f"gradwire {'b' * 40}\n")
    assert "nobody can say" in gpu.since()  # no git here
    assert gpu.git("init", "-q") is not None
    for name in ("link.py", "store.py", "tools/cli/plan.py"):
        write(name, "1")
    commit()
    assert "nobody can say" in gpu.since()  # not that commit
    (tmp_path / "log").write_text(f"gradwire {gpu.git('rev-parse', 'HEAD')}\n")
    assert "0 files under src/ that a GPU can meet changed" in gpu.since()
    write("tools/cli/plan.py", "2")
    write("link.py", "2")
    commit()
    assert "1 file under src/ that a GPU can meet changed" in gpu.since()
    write("store.py", "not committed")
    write("new.py", "nor known")
    assert "3 files under src/ that a GPU can meet changed" in gpu.since()
    assert "run `make gpu-tests`" in gpu.since()
