"""The samples are followed through the model, and never found by an axis that is as long as the batch by chance."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from gradwire.errors import MomentError
from gradwire.moments import Recorder, Row
from gradwire.moments.batch_axis import MOST

from ..oracle import Moments, assert_equal, by_sample, consume_all, recorded, trainable


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Net(nn.Module):
    """Layers by name and a forward of them."""

    def __init__(self, run: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(self, *args, **kwargs)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def by_frame(net: Any, x: Tensor) -> Tensor:
    """[B, T, C, H, W] through layers of pictures, a frame a row."""
    y = net.conv(x.flatten(0, 1)).relu()
    return net.head(net.norm(y).unflatten(0, x.shape[:2]).mean((1, 3, 4)))


def frames_first(net: Any, x: Tensor) -> Tensor:
    """As above, but the frames in front of the samples."""
    y = net.conv(x.transpose(0, 1).flatten(0, 1)).relu()
    return net.head(net.norm(y).unflatten(0, (x.shape[1], x.shape[0])).mean((0, 3, 4)))


def windows(net: Any, x: Tensor) -> Tensor:
    """[B, 4, 4, C] in four windows, as Swin takes them, and back."""
    parts = x.view(-1, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4)
    parts = net.a(net.norm(parts)).tanh()
    back = parts.view(-1, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)
    return net.b(back)


def attends_to_rows(net: Any, x: Tensor) -> Tensor:
    """[B, K, T, E]: attention within each of the K rows of a sample."""
    y = x.flatten(0, 1)
    return net.attention(y, y, y, need_weights=False)[0].unflatten(0, x.shape[:2])


# In every case some other axis is as long as the batch.
EXACT: dict[str, Any] = {
    "time first": (
        lambda: Net(lambda n, x: n.b(n.a(x.transpose(0, 1)).tanh()).transpose(0, 1), a=linear(), b=nn.LayerNorm(4)),
        lambda: floats(5, 5, 4),
    ),
    "flattened": (
        lambda: Net(lambda n, x: n.b(n.a(x.flatten(0, 1)).tanh()).view(x.shape), a=linear(), b=nn.LayerNorm(4)),
        lambda: floats(5, 5, 4),
    ),
    "flattened, time first": (
        lambda: Net(lambda n, x: n.a(x.transpose(0, 1).reshape(-1, 4)).view(5, -1, 4).transpose(0, 1), a=linear()),
        lambda: floats(5, 5, 4),
    ),
    "between": (
        lambda: Net(
            lambda n, x: n.a(x.permute(1, 0, 2, 3).reshape(-1, 4)).view(2, -1, 3, 4).transpose(0, 1), a=linear()
        ),
        lambda: floats(3, 2, 3, 4),
    ),
    "ids": (
        lambda: Net(lambda n, i: n.a(n.e(i.flatten())).view(*i.shape, 4), e=nn.Embedding(7, 4), a=linear()),
        lambda: torch.randint(0, 7, (4, 4)),
    ),
    "ids, time first": (
        lambda: Net(lambda n, i: n.a(n.e(i.T)).transpose(0, 1), e=nn.Embedding(7, 4), a=linear()),
        lambda: torch.randint(0, 7, (4, 4)),
    ),
    "frames": (
        lambda: Net(by_frame, conv=nn.Conv2d(2, 4, 3), norm=nn.GroupNorm(2, 4), head=nn.Linear(4, 3)),
        lambda: floats(3, 3, 2, 5, 5),
    ),
    "frames first": (
        lambda: Net(frames_first, conv=nn.Conv2d(2, 4, 3), norm=nn.GroupNorm(2, 4), head=nn.Linear(4, 3)),
        lambda: floats(3, 3, 2, 5, 5),
    ),
    "windows": (
        lambda: Net(windows, a=linear(), b=linear(), norm=nn.LayerNorm(4)),
        lambda: floats(4, 4, 4, 4),
    ),
    "attention within rows": (
        lambda: Net(attends_to_rows, attention=nn.MultiheadAttention(4, 2, batch_first=True)),
        lambda: floats(3, 3, 2, 4),
    ),
    "two views in a row": (
        lambda: Net(lambda n, x: torch.stack(n.a(torch.cat([x, x.flip(1)])).tanh().chunk(2), 1), a=linear()),
        lambda: floats(3, 4),
    ),
    "each row repeated": (
        lambda: Net(lambda n, x: n.a(x.repeat_interleave(2, 0) * 2).tanh().view(-1, 2, 4), a=linear()),
        lambda: floats(2, 4),
    ),
    "a label's row": (
        lambda: Net(lambda n, x: n.a(x)[torch.arange(len(x)), x.argmax(1)][:, None] * n.b(x), a=linear(), b=linear()),
        lambda: floats(4, 4),
    ),
    "padded convolution": (
        lambda: Net(lambda n, x: n.conv(x), conv=nn.Conv1d(2, 3, 4, padding="same")),
        lambda: floats(5, 2, 5),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_wherever_the_samples_lie_the_moment_is_exact(name: str) -> None:
    torch.manual_seed(0)
    make, draw = EXACT[name]
    net, x = make().double(), draw()
    # a model that is written for one batch size gets all of it: the loss of one sample alone
    wanted = by_sample(net, lambda: list(net(x).square().flatten(1).sum(1)))
    assert_equal(recorded(net, lambda: net(x).square().sum()), wanted)


def routed(net: Any, x: Tensor) -> Tensor:
    """Each token goes to the expert that its first feature names."""
    tokens = x.flatten(0, 1)
    out = torch.zeros_like(tokens)
    for number, expert in enumerate((net.a, net.b)):
        mine = (tokens[:, 0] > 0).eq(number).nonzero()[:, 0]
        out = out.index_add(0, mine, expert(tokens[mine]))
    return out.view_as(x)


def expert_batch() -> Tensor:
    """Four samples of two tokens, four of which go to either expert: as many as there are samples."""
    x = floats(4, 2, 4)
    x[:, :, 0] = torch.tensor([1.0, -1.0])
    return x


ESTIMATED: dict[str, Any] = {
    "an expert that gets B tokens": (lambda: Net(routed, a=linear(), b=linear()), expert_batch, "a", "by the data"),
    "tokens in another order": (
        lambda: Net(lambda n, x: n.a(x.flatten(0, 1)[torch.randperm(4 * len(x))]).view_as(x), a=linear()),
        lambda: floats(4, 4, 4),
        "a",
        "cannot be told",
    ),
    "a view across the samples": (
        lambda: Net(lambda n, x: n.a(x.transpose(0, 1).reshape(len(x), 3, 4)), a=linear()),
        lambda: floats(5, 3, 4),
        "a",
        "cannot be told",
    ),
    "prototypes, as many as the batch": (
        lambda: Net(lambda n, x: x @ n.a(torch.ones(4, 4).double()).t(), a=linear()),
        lambda: floats(4, 4),
        "a",
        "the same for all samples",
    ),
    "a mask of T by T": (
        lambda: Net(lambda n, x, m: x + n.a(m), a=linear()),
        lambda: (floats(4, 4, 4), floats(4, 4)),
        "a",
        "the same for all samples",
    ),
    "a mask that is multiplied": (
        lambda: Net(lambda n, x, m: n.a(m).softmax(-1) @ x, a=linear()),
        lambda: (floats(4, 4, 4), floats(4, 4)),
        "a",
        "the same for all samples",
    ),
    "relative positions": (
        lambda: Net(
            lambda n, x: x @ n.a((torch.arange(4)[:, None] - torch.arange(4)).abs()).sum(-1), a=nn.Embedding(4, 3)
        ),
        lambda: floats(4, 4, 4),
        "a",
        'say batch_dim={its module: "positions"}',
    ),
}


def row_of(net: nn.Module, name: str, given: Any, **options: Any) -> Row:
    recorder = Recorder(net, trainable(net), **options)
    net(*(given if isinstance(given, tuple) else (given,))).square().sum().backward()
    consume_all(recorder)
    rows = {row.name: row for row in recorder.coverage()}
    recorder.remove()
    return rows[f"{name}.weight"]


@pytest.mark.parametrize("name", ESTIMATED)
def test_what_is_as_long_as_the_batch_by_chance_is_estimated_and_says_why(name: str) -> None:
    torch.manual_seed(0)
    make, draw, layer, why = ESTIMATED[name]
    row = row_of(make().double(), layer, draw())
    assert row.kind == "step"
    assert why in row.why
    assert "; two micro-batches and more estimate it best" in row.why, "what to do"
    with pytest.raises(MomentError, match="strict=True wants exact moments"):
        row_of(make().double(), layer, draw(), strict=True)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_any_batch_size(batch: int) -> None:
    torch.manual_seed(0)
    net = Net(lambda n, x: n.b(n.a(x.flatten(0, 1)).tanh()).view(x.shape), a=linear(), b=nn.LayerNorm(4)).double()
    x = floats(batch, 3, 4)
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(batch)])
    assert_equal(recorded(net, lambda: net(x).square().sum()), wanted)


def test_sequences_of_any_length() -> None:
    """More lengths than are followed: where the samples lie does not depend on them."""
    torch.manual_seed(0)
    net = Net(
        lambda n, x: n.b(n.a(x.flatten(0, 1)).tanh().view(x.shape).transpose(0, 1)), a=linear(), b=linear()
    ).double()
    recorder = Recorder(net, trainable(net), strict=True)
    for length in range(1, MOST + 4):
        x = floats(3, length, 4)
        net.zero_grad()
        net(x).square().sum().backward()
        found = {name: recorder.moment(name).clone() for name in recorder.accounts}
        consume_all(recorder)
        twin = Net(net.run, a=linear(), b=linear()).double()
        twin.load_state_dict(net.state_dict())
        assert_equal(
            found, by_sample(twin, lambda twin=twin, x=x: [twin(x[b : b + 1]).square().sum() for b in range(3)])
        )
    recorder.remove()


class History:
    """An object that a model may keep, as a cache."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.lock = threading.Lock()  # cannot be copied


class Leaves(nn.Module):
    """Leaves things behind on itself, draws numbers, prints, counts in a buffer, and calls what follows by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls: list[int] = []
        self.cache: dict[str, Any] = {"all": [], "lock": threading.Lock()}
        self.recent: deque[Tensor] = deque(maxlen=3)
        self.table: Tensor | None = None
        self.others = [self.layer]
        self.dice, self.numpy_dice = random.Random(0), numpy.random.default_rng(0)
        self.drawn: tuple[float, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        self.cache["x"] = x
        self.cache["all"].append(x)
        self.recent.append(x)
        self.drawn = (self.dice.random(), self.numpy_dice.random(), numpy.random.rand())
        print("forward")
        if self.table is None:
            self.table = torch.arange(4.0) * random.random()
        return self.norm(self.others[0](x * self.table))


def test_the_model_is_not_touched(capsys: pytest.CaptureFixture[str]) -> None:
    net, alone = Leaves(), Leaves()
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    recorder = Recorder(net, trainable(net))
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    alone(torch.randn(3, 4))
    expected = alone.table
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    seen: list[Any] = []

    def inspect(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append((net.calls[:], [*net.cache["all"], *net.recent], net.table, [*net.cache]))
        seen.append({n: b.clone() for n, b in net.named_buffers()})

    net.register_forward_pre_hook(inspect)  # after the recorder's own, so it sees what that left
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    capsys.readouterr()
    net(x)
    assert seen[0] == ([], [], None, ["all", "lock"])
    assert all(torch.equal(seen[1][name], buffer) for name, buffer in buffers.items())
    assert torch.equal(state, torch.get_rng_state())
    assert net.calls == [0]
    assert net.cache["x"] is x
    assert net.drawn == alone.drawn
    assert torch.equal(net.table, expected)
    assert capsys.readouterr().out == "forward\n"
    assert recorder.batch_axis.followed
    recorder.remove()


def checkpointed(net: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)  # type: ignore[no-any-return]


def through_arrays(net: nn.Module, x: Tensor) -> Tensor:
    """What is saved for the backward is kept as arrays."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().numpy(), torch.from_numpy):
        return net(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", [checkpointed, through_arrays])
def test_a_hook_on_what_is_saved_does_not_meet_what_is_followed(around: Callable[..., Tensor]) -> None:
    """A checkpoint around the whole model would count it: another number of tensors than when it recomputes."""
    torch.manual_seed(0)
    net = Net(lambda n, x: n.b(n.a(x.transpose(0, 1)).tanh()).transpose(0, 1), a=linear(), b=linear()).double()
    one, other = floats(4, 4, 4), floats(4, 4, 4)

    def loss(run: Callable[..., Tensor], b: slice) -> Tensor:
        return (run(net, one[b]) - run(net, other[b])).square().sum()

    wanted = by_sample(net, lambda: [loss(Net.__call__, slice(b, b + 1)) for b in range(4)])
    assert_equal(recorded(net, lambda: loss(around, slice(None))), wanted)


def branching(net: Any, x: Tensor) -> Tensor:
    """Time first; goes by numbers in the data, and refuses some."""
    if torch.isnan(x).any() or torch.equal(x, x + 1):
        raise ValueError("no number")
    x = x.transpose(0, 1)
    y = net.a(x) if float(x.detach().sum()) > -1e9 else net.b(x)
    return (y.tanh() * round(1 + 0 * x.mean().item())).transpose(0, 1)


def turning(net: Any, x: Tensor) -> Tensor:
    """What the data decides is where the samples lie."""
    return net.a(x).tanh() if x.detach().sum() > 1e9 else net.a(x.transpose(0, 1)).tanh().transpose(0, 1)


def dropping_empty(net: Any, x: Tensor) -> Tensor:
    """As routed, but an expert without a token is left out, which nobody knows beforehand."""
    tokens = x.flatten(0, 1)
    out = torch.zeros_like(tokens)
    for number in (tokens[:, 0] > 0).long().unique().tolist():
        mine = (tokens[:, 0] > 0).eq(number).nonzero()[:, 0]
        if mine.numel() > 0:
            out = out.index_add(0, mine, (net.a, net.b)[number](tokens[mine]))
    return net.c(out.view_as(x))


def test_either_branch_is_followed() -> None:
    torch.manual_seed(0)
    net, x = Net(branching, a=linear(), b=linear()).double(), floats(4, 4, 4)
    recorder = Recorder(net, trainable(net))
    net(x).pow(3).sum().backward()
    assert [row.kind for row in recorder.coverage()] == ["exact", "exact", "not seen yet", "not seen yet"]
    found = {name: recorder.moment(name) for name in ("a.weight", "a.bias")}
    recorder.remove()
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).pow(3).sum() for b in range(4)])
    assert_equal(found, {name: wanted[name] for name in found})


def test_where_branches_differ_nothing_is_believed() -> None:
    row = row_of(Net(turning, a=linear()).double(), "a", floats(4, 4, 4))
    why = "torch.nn.modules.linear.Linear: it is called with the samples along different axes"
    assert (row.kind, row.why.partition(",")[0]) == ("step", why)


def test_what_comes_after_a_choice_by_the_data_is_followed() -> None:
    net = Net(dropping_empty, a=linear(), b=linear(), c=linear()).double()
    rows = {name: row_of(net, name, expert_batch()) for name in ("a", "b", "c")}
    assert rows["c"].kind == "exact"
    assert ["by the data" in rows[name].why for name in ("a", "b")] == [True, True]


def through_numpy(net: Any, x: Tensor) -> Tensor:
    """What nothing without values can follow."""
    return net.a(x * float(x.detach().numpy().std()))


@pytest.mark.parametrize("length", [3, 5])
def test_what_cannot_be_followed_is_measured_and_the_report_says_so(length: int) -> None:
    """Unless another axis is as long."""
    torch.manual_seed(0)
    net, x = Net(through_numpy, a=linear()).double(), floats(3, length, 2, 4)
    recorder = Recorder(net, trainable(net))
    net(x).square().sum().backward()
    rows = {row.name: row for row in recorder.coverage()}
    assert rows["a.weight"].kind == ("step" if length == 3 else "exact")
    told = "another axis is as long as the batch; say batch_dim={its module: dim}"
    assert (told in rows["a.weight"].why) == (length == 3)
    said = recorder.batch_axis.describe(recorder.batch)
    assert said.startswith("samples: 3, axis 0 of the first input `")
    assert "in layers the axes that are as long, since they could not be followed: " in said
    recorder.remove()


@dataclass
class Pair:
    """What a data loader may yield."""

    number: Tensor
    x: Tensor


@pytest.mark.parametrize("given", [lambda x: Pair(torch.tensor(2.0), x), lambda x: {"number": torch.tensor(2), "x": x}])
def test_samples_are_found_in_nested_inputs(given: Callable[[Tensor], Any]) -> None:
    """And not in a number."""

    def run(net: Any, pair: Any) -> Tensor:
        x = pair.x if isinstance(pair, Pair) else pair["x"]
        return net.a(x.transpose(0, 1)).tanh().transpose(0, 1)

    torch.manual_seed(0)
    net, x = Net(run, a=linear()).double(), floats(4, 4, 4)
    wanted = by_sample(net, lambda: [net(given(x[b : b + 1])).pow(3).sum() for b in range(4)])
    assert_equal(recorded(net, lambda: net(given(x)).pow(3).sum()), wanted)


def test_a_path_drawn_at_random_is_followed_without_chance() -> None:
    """Layer drop: in training nothing says whether the layer is left out, in eval it is not."""

    def drops(net: Any, x: Tensor) -> Tensor:
        x = net.a(x.transpose(0, 1))
        if not net.training or torch.rand([]) < 2:
            x = net.b(x)
        return x.transpose(0, 1)

    torch.manual_seed(0)
    net, x = Net(drops, a=linear(), b=linear()).double().train(), floats(5, 5, 4)
    wanted = by_sample(net, lambda: list(net(x).square().flatten(1).sum(1)))
    assert_equal(recorded(net, lambda: net(x).square().sum()), wanted)


def test_a_layer_that_was_not_met_is_followed_in_the_next_pass() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.late = linear(), linear(), False

        def forward(self, x: Tensor) -> Tensor:
            return (self.b if self.late else self.a)(x.transpose(0, 1))

    net, x = Later(), torch.randn(5, 5, 4)
    recorder = Recorder(net, trainable(net))
    kinds = []
    for late in (False, True, True):
        net.late = late
        net.zero_grad()
        net(x).square().sum().backward()
        consume_all(recorder)
        kinds.append({row.name: row.kind for row in recorder.coverage()}["b.weight"])
    assert kinds == ["not seen yet", "step", "exact"]
    recorder.remove()


class Language(nn.Module):
    """An LSTM given [T, B] or [B, T]."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.lstm = nn.LSTM(4, 4, batch_first=first)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(words))[0])


@pytest.mark.parametrize("first", [True, False])
def test_through_a_recurrent_layer(first: bool) -> None:
    torch.manual_seed(0)
    net, axis = Language(first).double(), 0 if first else 1
    words = torch.randint(0, 9, (5, 5))
    wanted = by_sample(net, lambda: [net(words.narrow(axis, b, 1)).square().sum() for b in range(5)])
    recorder = Recorder(net, trainable(net), batch_dim=axis)
    net(words).square().sum().backward()
    rows = {row.name: row.kind for row in recorder.coverage()}
    names = ["table.weight", "head.weight", "head.bias"]
    assert [rows[name] for name in names] == ["exact"] * 3
    found: Moments = {name: recorder.moment(name) for name in names}
    assert_equal(found, {name: wanted[name] for name in names})
    assert recorder.batch_axis.describe(recorder.batch) == f"samples: 5, axis {axis} of the first input `words`"
    recorder.remove()


class Stateful(Language):
    """As above, but its state is given to it and back."""

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        output, state = self.lstm(self.table(words), state)
        return self.head(output), state


@pytest.mark.parametrize("first", [True, False])
def test_a_state_has_samples_second(first: bool) -> None:
    torch.manual_seed(0)
    net, axis = Stateful(first).double(), 0 if first else 1
    words, state = torch.randint(0, 9, (5, 5)), (floats(1, 5, 4), floats(1, 5, 4))

    def loss(b: slice) -> Tensor:
        given = words[b] if first else words[:, b]
        return net(given, tuple(one[:, b] for one in state))[0].square().sum()

    wanted = by_sample(net, lambda: [loss(slice(b, b + 1)) for b in range(5)])
    recorder = Recorder(net, trainable(net), batch_dim=axis)
    loss(slice(None)).backward()
    assert recorder.batch_axis.followed
    names = ["table.weight", "head.weight", "head.bias"]
    assert [row.kind for row in recorder.coverage() if row.name in names] == ["exact"] * 3
    assert_equal({name: recorder.moment(name) for name in names}, {name: wanted[name] for name in names})
    recorder.remove()


@pytest.mark.parametrize("batch", [1, 3])
def test_a_padding_mask_has_samples_first_where_sequences_have_them_second(batch: int) -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 12, 0.0).double()
    x, hidden = floats(3, batch, 8), torch.arange(3)[None] >= torch.tensor([3, 2, 1])[:batch, None]

    def output(b: slice) -> Tensor:
        return net(x[:, b], src_key_padding_mask=hidden[b]).pow(3).sum()

    wanted = by_sample(net, lambda: [output(slice(b, b + 1)) for b in range(batch)])
    assert_equal(recorded(net, lambda: output(slice(None)), batch_dim=1), wanted, 1e-8)


def test_two_inputs_whose_batches_never_meet() -> None:
    """Pictures against texts: the logits are [B, B]."""
    torch.manual_seed(0)
    net = Net(
        lambda n, a, b: n.a(a.flatten(0, 1)).sum() + n.b(b.transpose(0, 1)).sum(), a=linear(), b=linear()
    ).double()
    one, other = floats(4, 4, 4), floats(4, 3, 4)
    wanted = by_sample(net, lambda: [net(one[b : b + 1], other[b : b + 1]) for b in range(4)])
    assert_equal(recorded(net, lambda: net(one, other)), wanted)


def test_a_loss_made_inside_the_model() -> None:
    torch.manual_seed(0)
    net = Net(lambda n, x, y: F.cross_entropy(n.a(x).flatten(0, 1), y.flatten(), reduction="sum"), a=linear()).double()
    x, y = floats(3, 3, 4), torch.randint(0, 4, (3, 3))
    wanted = by_sample(net, lambda: [net(x[b : b + 1], y[b : b + 1]) for b in range(3)])
    assert_equal(recorded(net, lambda: net(x, y=y)), wanted)
