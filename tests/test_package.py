"""The package from outside: its names, what importing it costs, and that it needs nothing which only the tools need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from gradwire.methods import table

ONLY_TOOLS = ("rich", "typer", "tomli", "click", "sklearn", "matplotlib")
BLOCKED = """
import sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec  # of whatever is installed
hidden = lambda name: name.partition(".")[0] in HIDDEN or name in HIDDEN
PathFinder.find_spec = lambda name, *rest: None if hidden(name) else found(name, *rest)
"""
MAIN = "from gradwire.__main__ import main; main()"
CORE = """
import torch, torch.distributed as dist
from torch import nn
import gradwire

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
model = nn.parallel.DistributedDataParallel(net)
wire = gradwire.attach(model, gradwire.VGC(alpha=1.5))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print(wire.stats(), wire.coverage())
gradwire.save(wire, sys.argv[1])
gradwire.load(wire, sys.argv[1])
loss = lambda model, x, y: (model(x) - y).square().mean()
simulation = gradwire.simulate(nn.Linear(4, 1), "topk:density=0.5", loss, workers=2)
simulation.backward(torch.randn(2, 8, 4), torch.randn(2, 8, 1))
"""


def python(program: str, *arguments: object, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A Python in which these modules are not installed."""
    program = BLOCKED.replace("HIDDEN", repr(without)) + program
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)


def test_the_library_needs_nothing_that_only_the_tools_need(tmp_path):
    result = python(CORE, tmp_path / "saved", without=(*ONLY_TOOLS, "gradwire.tools"))
    assert result.returncode == 0, result.stderr


def test_the_command_says_in_one_sentence_what_to_install():
    result = python(MAIN, "methods", without=ONLY_TOOLS)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("gradwire: the command line needs ")
    assert result.stderr.endswith(", which is missing: pip install 'gradwire[tools]'\n")


def test_another_error_of_the_command_line_is_not_taken_for_a_missing_extra():
    result = python(MAIN, "methods", without=("gradwire.tools.lab",))
    assert "ModuleNotFoundError: No module named 'gradwire.tools.lab'" in result.stderr


def test_importing_the_package_loads_no_compiler_no_checkpoints_and_no_layers():
    result = python("import sys, gradwire; print(*sys.modules)")
    loaded = set(result.stdout.split())
    assert "gradwire.methods.table" in loaded
    late = {"numba", "triton", "torch.distributed.checkpoint", *ONLY_TOOLS}
    late |= {f"gradwire.{room}" for room in ("moments", "exchange", "adapters", "state", "plan", "simulation", "tools")}
    assert not late & loaded


def test_every_name_is_there_for_people_and_for_star_imports():
    found: dict[str, object] = {}
    exec("from gradwire import *", found)
    methods = {known.method.__name__ for known in table.METHODS.values()}
    assert (
        methods | {"attach", "simulate", "save", "load", "reshard", "per_sample", "from_spec", "Wire"} <= found.keys()
    )
    assert found.keys() - {"__builtins__"} == set(gradwire.__all__)
    assert set(gradwire.__all__) <= set(dir(gradwire))
    assert all(getattr(gradwire, name) is found[name] for name in gradwire.__all__)
    with pytest.raises(AttributeError, match="module 'gradwire' has no attribute 'atach'"):
        _ = gradwire.atach


def test_type_checkers_see_the_same_names():
    """Only what is imported by its own name, or by a star, is public to them."""
    seen = public_imports(Path(gradwire.__file__)) | public_imports(Path(table.__file__))
    assert seen == set(gradwire.__all__)


def public_imports(path: Path) -> set[str]:
    imports = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name for node in imports for alias in node.names if alias.name == alias.asname}
