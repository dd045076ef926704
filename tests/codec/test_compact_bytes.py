"""What the bytes are: golden files, the example of the documentation, every refusal by name, and what they cost."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import make_golden
import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.codec import compact, words
from gradwire.codec.compact import PROBLEMS
from gradwire.codec.form import Blocks
from gradwire.errors import MessageError
from gradwire.layout import Layout

ROOT = Path(__file__).parents[2]
EXAMPLE = Blocks.of(Layout.of([("weight", (300,)), ("bias", (20,))]), (6, 2))
EXAMPLE_INDEX = torch.tensor([3, 40, 41, 130, 299, 307])
EXAMPLE_CODE = torch.tensor([2, 8 + 2, 1, 2, 8 + 7, 8 + 0], dtype=torch.int32)


def program(path: Path) -> ModuleType:
    """A script that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["reference", "numba"])
def codec(request) -> ModuleType:
    if request.param == "reference":
        return compact
    return pytest.importorskip("on_cpu", reason="Numba is not installed", exc_type=ImportError)


def elements_of(case) -> tuple[Tensor, Tensor]:
    index, code = make_golden.stored(f"{case.name}.elements.bin").chunk(2)
    assert len(index) > 0
    return index.long(), code


@pytest.mark.parametrize("case", make_golden.CASES, ids=lambda case: case.name)
def test_golden_compact_bytes(case, codec):
    index, code = elements_of(case)
    stored = make_golden.stored(f"{case.name}.compact.bin")
    orders, body = codec.pack(index, code, case.blocks)
    assert torch.equal(torch.cat([orders, body]), stored)
    n_tensors = len(case.numels)
    back = codec.unpack(stored[:n_tensors], stored[n_tensors:], case.blocks)
    assert torch.equal(back[0], index)
    assert torch.equal(back[1], code)


@pytest.mark.parametrize("case", make_golden.CASES, ids=lambda case: case.name)
def test_golden_words(case):
    index, code = elements_of(case)
    stored = make_golden.stored(f"{case.name}.words.bin")
    assert torch.equal(words.pack(index, code, case.chunk), stored)
    counts = torch.bincount(index // case.chunk)
    places, codes = words.unpack(stored, counts, case.chunk)
    assert torch.equal(places, index)
    assert torch.equal(codes, code)


def documented(name: str) -> Tensor:
    """The words in hexadecimal that follow a marker in docs/wire-format.md."""
    text = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
    block = text.split(f"<!-- example: {name} -->\n\n")[1].split("\n\n")[0]
    return torch.from_numpy(np.frombuffer(bytes.fromhex(block), "<i4").astype(np.int32))


def test_the_example_of_the_documentation(codec):
    orders, body = documented("orders"), documented("body")
    index, code = codec.unpack(orders, body, EXAMPLE)
    assert torch.equal(index, EXAMPLE_INDEX)
    assert torch.equal(code, EXAMPLE_CODE)
    assert all(torch.equal(*pair) for pair in zip(codec.pack(index, code, EXAMPLE), (orders, body), strict=True))
    assert torch.equal(words.pack(index, code, 1 << 28), documented("words"))


def refused(codec: ModuleType, orders: Tensor, body: Tensor, blocks: Blocks, problem: int) -> None:
    with pytest.raises(MessageError) as caught:
        codec.unpack(orders, body, blocks)
    assert codec is not compact or PROBLEMS[problem] in str(caught.value)  # machine code says that it is broken


def change(words: Tensor, changes: dict[int, int]) -> None:
    for at, value in changes.items():
        words.numpy().view(np.uint32)[at] = value


@pytest.mark.parametrize(
    ("problem", "part", "changes"),
    [
        (1, "orders", {0: 0}),  # every symbol is d = 0
        (1, "orders", {1: 0x03FAC688}),  # a bit above the shape
        (1, "orders", {1: 0xFFFFFFFF}),
        (4, "body", {1: 0x8460041E}),  # 7, and the capacity is 6
        (5, "body", {0: 0b101}),  # a payload of one word
        (6, "body", {2: 0x00026D08}),  # the fifth one is gone
        (7, "body", {2: 0x01026D08}),  # the fifth one comes a bit later: place 331
        (8, "body", {0: 0b011}),  # a payload longer than its planes
        (8, "body", {1: 0xE460041C, 2: 0x00826FDB}),  # every code of class 3: extra bits behind the end
        (9, "body", {3: 0x0010012E}),  # a bit behind the end of a payload,
        (9, "body", {4: 1}),  # behind the last one,
        (9, "body", {0: 0b1110}),  # and behind the directory
    ],
)
def test_every_refusal_says_what_is_wrong(codec, problem, part, changes):
    message = {"orders": documented("orders"), "body": documented("body")}
    change(message[part], changes)
    refused(codec, **message, blocks=EXAMPLE, problem=problem)


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (2, {0: 63 << 6}),  # 49 words of payload, and lengths of 6 bits
        (2, {0: 25 | 25 << 6}),
        (3, {3: 63}),  # 64 elements in 44 places
    ],
)
def test_every_refusal_of_a_message_with_two_blocks(codec, problem, changes):
    blocks = Blocks.of(Layout.of([("weight", (300,))]), (300,))  # of 256 and 44 places
    orders, body = codec.pack(torch.tensor([0, 1, 2, 260]), torch.zeros(4, dtype=torch.int32), blocks)
    assert body[0] == 2 | 1 << 6
    assert (blocks.payload_words, blocks.entry_bits) == (49, (6,))
    change(body, changes)
    refused(codec, orders, body, blocks, problem)


def test_a_signs_only_message_has_no_orders(codec):
    blocks = Blocks.of(EXAMPLE.layout, EXAMPLE.capacity, hybrid=True)
    orders, body = codec.pack(EXAMPLE_INDEX, EXAMPLE_CODE & 8, blocks)
    assert orders.tolist() == [0, 0]
    assert len(body) < EXAMPLE.words
    with pytest.raises(MessageError, match="permutation" if codec is compact else "broken"):
        codec.unpack(documented("orders"), body, blocks)


def test_a_message_of_another_length_is_refused(codec):
    orders, body = documented("orders"), documented("body")
    for cut in [(orders, body[:-1]), (orders[:-1], body), (orders, torch.cat([body, body[-1:]]))]:
        with pytest.raises(MessageError, match=r"expected 2 orders and a compact body of 5 words"):
            codec.unpack(*cut, EXAMPLE)


@pytest.fixture(scope="module")
def wire_bits() -> ModuleType:
    """benchmarks/wire_bits.py: codes of the digits task, trained for 60 steps by VGC's rule with exact moments."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    return program(ROOT / "benchmarks" / "wire_bits.py")


@pytest.mark.parametrize("ratio", [10, 100, 1000, 10000])
def test_a_message_costs_at_most_1_10_of_shannons_bound(wire_bits, ratio):
    """Real codes at random places. Nothing can cost less than the bound but by luck: below 0.85 the sum is wrong."""
    sent = wire_bits.scattered([(ratio << 13,), (ratio << 12,)], ratio)
    share = wire_bits.used_bits(sent) / wire_bits.shannon_bits(sent)
    assert 0.85 <= share <= 1.10
    assert 3.0 <= wire_bits.entropy_bits(torch.bincount(sent.code)) <= 4.0


def test_a_message_of_many_small_tensors_costs_at_most_1_10_of_shannons_bound(wire_bits):
    """ResNet-50's 161 tensors at a ratio of 10,000: 16 elements a tensor, most have none or one."""
    row = wire_bits.bits_row("", [wire_bits.scattered(wire_bits.resnet50(), 10_000)])
    assert 0.85 <= row["ratio"] <= 1.08


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_real_messages_cost_at_most_1_10_of_shannons_bound(wire_bits, alpha):
    """Places as they are, six tensors from 10 to 65,536 elements."""
    row = wire_bits.bits_row("", list(wire_bits.digits(alpha))[::5])
    assert 0.85 <= row["ratio"] <= 1.10


@pytest.mark.gpu
def test_the_reference_is_the_same_on_a_gpu():
    random = np.random.default_rng(0)
    index = torch.from_numpy(np.flatnonzero(random.random(100_000) < 0.05))
    code = torch.from_numpy(random.integers(0, 16, len(index)).astype(np.int32))
    blocks = Blocks.of(Layout.of([("a", (100_000,))]), (len(index),))
    orders, body = compact.pack(index.cuda(), code.cuda(), blocks)
    assert torch.equal(body.cpu(), compact.pack(index, code, blocks)[1])
    back = compact.unpack(orders, body, blocks)
    assert torch.equal(back[0].cpu(), index)
    assert torch.equal(back[1].cpu(), code)
