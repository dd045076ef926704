"""What is exact, what is estimated and why: sample axes, per_sample, the report, and strict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from gradwire.errors import MomentError
from gradwire.moments import Recorder, Row, per_sample
from gradwire.moments.coverage import table

from .oracle import Root, assert_equal, by_sample, consume_all, recorded, trainable

WITHOUT = (
    "torch.nn.modules.rnn.LSTM has no exact formula; estimator='signs', or two micro-batches and more, estimate it best"
)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rows_after(net: nn.Module, *inputs: Any, steps: int = 1, **options: Any) -> dict[str, Row]:
    """The report after `steps` micro-batches."""
    recorder = Recorder(net, trainable(net), **options)
    for _ in range(steps):
        output = net(*inputs)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
    consume_all(recorder)
    rows = {row.name: row for row in recorder.coverage()}
    recorder.remove()
    return rows


class Override(nn.Linear):
    """A product by einsum, through which samples are not followed."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", x, self.weight) + self.bias


class Inherit(nn.Linear):
    pass


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,i->bi", x, self.scale)


class Shuffles(nn.Module):
    """Samples and positions in one axis, in an order that nobody can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)[torch.randperm(x.shape[0] * x.shape[1])])


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.3)
    return layer


ESTIMATED: dict[str, Any] = {
    "LSTM": (lambda: nn.LSTM(4, 4, batch_first=True), (3, 5, 4), "weight_hh_l0", "LSTM has no exact formula"),
    "GRUCell": (lambda: nn.GRUCell(4, 4), (3, 4), "weight_hh", "GRUCell has no exact formula"),
    "pruning": (pruned, (3, 4), "weight_orig", "Linear computes its weight from it"),
    "forward overridden": (
        lambda: Override(4, 4),
        (3, 4),
        "weight",
        "test_coverage.Override gives it to torch's einsum",
    ),
    "raw parameter": (Raw, (3, 4), "scale", "test_coverage.Raw gives it to torch's einsum"),
    "no sample axis": (Shuffles, (3, 5, 4), "layer.weight", "how the samples lie in its rows cannot be told"),
    "no batch axis": (lambda: nn.Conv1d(4, 4, 2), (4, 6), "weight", "its input has 2 dims and no batch axis"),
}


@pytest.mark.parametrize("name", ESTIMATED)
def test_what_has_no_exact_moment_is_estimated_and_says_why(name: str) -> None:
    make, shape, param, why = ESTIMATED[name]
    net, x = make(), torch.randn(*shape)
    row = rows_after(net, x)[param]
    assert row.kind == "step"
    assert why in row.why
    assert "one micro-batch" in row.why
    net = make()
    row = rows_after(net, x, steps=2)[param]
    assert (row.kind, "one micro-batch" in row.why) == ("groups", False)
    assert why in row.why


@pytest.mark.parametrize("name", ESTIMATED)
def test_strict_refuses_estimates_and_names_the_parameter(name: str) -> None:
    make, shape, param, why = ESTIMATED[name]
    net = make()
    with pytest.raises(MomentError, match="strict=True wants exact moments") as caught:
        rows_after(net, torch.randn(*shape), strict=True)
    assert why.split(",")[0] in str(caught.value)
    assert "strict=False" in str(caught.value)
    early = "can only be estimated" in str(caught.value)
    assert early == (name in ("LSTM", "GRUCell", "pruning"))
    if not early:
        assert f"{param.rpartition('.')[0]}" in str(caught.value)


def test_a_subclass_that_overrides_nothing_is_exact() -> None:
    rows = rows_after(Inherit(4, 4), torch.randn(3, 4), strict=True)
    assert {row.kind for row in rows.values()} == {"exact"}


def test_a_weight_normed_layer_is_exact() -> None:
    rows = rows_after(weight_norm(nn.Linear(4, 4)), torch.randn(3, 4))
    assert {row.kind for row in rows.values()} == {"exact"}


def test_the_report_before_and_after() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LSTM(4, 4))
    net[2].requires_grad_(False)
    names = dict(net.named_parameters())
    recorder = Recorder(net, names)
    before = {row.name: row for row in recorder.coverage()}
    assert before["0.weight"] == Row("0.weight", "not seen yet", "no gradient so far")
    assert before["3.weight_hh_l0"] == Row("3.weight_hh_l0", "not seen yet", WITHOUT)
    net[:3](torch.randn(5, 4))
    recorder.passes.begin(5)
    net[1](net[0](torch.randn(5, 4))).square().sum().backward()
    after = {row.name: row.kind for row in recorder.coverage()}
    assert after["0.weight"] == "exact"
    assert after["1.weight"] == after["1.bias"] == "by activation"
    assert after["2.weight"] == "frozen"
    assert after["3.weight_hh_l0"] == "not seen yet"
    recorder.remove()


def test_exact_false_estimates_everything() -> None:
    rows = rows_after(nn.Linear(4, 4), torch.randn(3, 4), exact=False)
    assert {(row.kind, row.why.split(";")[0]) for row in rows.values()} == {("step", "exact=False")}
    with pytest.raises(ValueError, match="strict=True wants exact moments and exact=False forbids them"):
        Recorder(nn.Linear(4, 4), {}, exact=False, strict=True)


@pytest.mark.parametrize("dims", [{"": 0, "layer": None}, {"": None}, {"": 0, "layer.0": None}])
def test_batch_dim_none_means_no_sample_axis(dims: dict[str, int | None]) -> None:
    net = Root(nn.Sequential(nn.Linear(4, 4)))
    rows = rows_after(net, torch.empty(3), torch.randn(3, 4), batch_dim=dims)
    assert rows["layer.0.weight"].kind == "step"
    assert "no sample axis" in rows["layer.0.weight"].why


def test_the_longest_prefix_names_the_axis() -> None:
    """Samples first for the model and its first layer, second for its second."""
    torch.manual_seed(0)

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.inner = nn.Linear(4, 4), nn.ModuleDict({"b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> Tensor:
            turned = self.inner["b"](self.a(x).tanh().transpose(0, 1)).tanh()
            return self.inner["c"](turned.transpose(0, 1))

    net, x = Turns().double(), floats(3, 3, 4)
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(3)])

    def loss() -> Tensor:
        return net(x).square().sum()

    assert_equal(recorded(net, loss, batch_dim={"inner": 1, "inner.c": 0}), wanted)
    assert_equal(recorded(net, loss), wanted)  # followed
    wrong = recorded(net, loss, batch_dim={"inner": 0})
    assert_equal({"a.weight": wrong["a.weight"]}, {"a.weight": wanted["a.weight"]})
    assert not torch.allclose(wrong["inner.b.weight"], wanted["inner.b.weight"], rtol=0.05), "the axis matters"


def test_batch_dim_is_checked() -> None:
    with pytest.raises(ValueError, match="names 'lyaer', but the model has no such module; it has: layer"):
        Recorder(Root(nn.Linear(4, 4)), {}, batch_dim={"lyaer": 1})
    with pytest.raises(ValueError, match="must count from the front, but is -1"):
        Recorder(nn.Linear(4, 4), {}, batch_dim=-1)
    with pytest.raises(ValueError, match="estimator must be one of groups, signs, step, but is 'guess'"):
        Recorder(nn.Linear(4, 4), {}, estimator="guess")


@pytest.mark.parametrize("given", ["args", "kwargs", "nested", "mapping"])
def test_the_batch_is_read_from_the_first_tensor(given: str) -> None:
    net = nn.Linear(4, 4)
    seen: list[Any] = []

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            seen.append((args, kwargs))
            return self.net(x)

    x, root = torch.randn(3, 4), Takes()
    recorder = Recorder(root, trainable(root))
    calls: dict[str, Any] = {
        "args": lambda: root("text", x, torch.empty(7)),
        "kwargs": lambda: root(2, flag=True, x=x, y=torch.empty(7)),
        "nested": lambda: root([1, ("a", {"x": x})], torch.empty(7)),
        "mapping": lambda: root({"x": x, "y": torch.empty(7)}),
    }
    calls[given]()
    assert (recorder.batch, recorder.passes.current.number) == (3, 1)
    recorder.remove()


def test_a_model_not_called_through_its_root_has_no_batch() -> None:
    net = Root(nn.Linear(4, 4))
    recorder = Recorder(net, trainable(net))
    net.layer(torch.randn(3, 4)).sum().backward()
    rows = {row.name: row for row in recorder.coverage()}
    assert rows["layer.weight"].kind == "step"
    assert "the batch size is unknown" in rows["layer.weight"].why
    recorder.remove()


class Broadcast(nn.Module):
    """A position embedding, a scale, a bias of one number and a class token, all raw parameters."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.position = nn.Parameter(torch.randn(*((1, 5) if axis == 0 else (5, 1)), 4))
        self.scale, self.offset = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
        self.token = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + per_sample(self.position, x, self.axis)).tanh() * per_sample(self.scale, x, self.axis)
        x = x + per_sample(self.offset, x, self.axis)
        token = per_sample(self.token, x, self.axis)
        return torch.cat([token, x * per_sample(self.scale, x, self.axis)], 1 - self.axis).tanh()


@pytest.mark.parametrize("axis", [0, 1])
def test_per_sample_makes_a_raw_parameter_exact(axis: int) -> None:
    torch.manual_seed(0)
    net = Broadcast(axis).double()
    x = floats(*((3, 5) if axis == 0 else (5, 3)), 4)
    wanted = by_sample(net, lambda: [net(x.narrow(axis, b, 1)).square().sum() for b in range(3)])
    assert_equal(recorded(net, lambda: net(x).square().sum(), batch_dim=axis), wanted)


def test_per_sample_refuses_a_parameter_with_samples_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"of shape \(3, 4\) for x of shape \(3, 4\); give it size 1 there"):
        per_sample(nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4))
    with pytest.raises(ValueError, match="along axis 0"):
        per_sample(nn.Parameter(torch.randn(1, 3, 4)), torch.randn(3, 4))


def test_a_raw_use_beside_per_sample_is_noticed() -> None:
    class Half(Raw):
        def forward(self, x: Tensor) -> Tensor:
            return x * per_sample(self.scale, x) + torch.einsum("bi,i->bi", x, self.scale)

    assert "also used outside" in rows_after(Half(), torch.randn(3, 4))["scale"].why


def test_a_raw_parameter_under_per_sample_is_exact_in_the_report() -> None:
    class Good(Raw):
        def forward(self, x: Tensor) -> Tensor:
            return x * per_sample(self.scale, x)

    assert rows_after(Good(), torch.randn(3, 4), strict=True)["scale"].kind == "exact"


def test_attention_without_a_batch_axis_is_estimated() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    rows = rows_after(Alone(), torch.randn(5, 4))
    assert "its query has no batch axis" in rows["attention.in_proj_weight"].why


def test_the_table_names_every_parameter_and_counts_the_kinds() -> None:
    rows = [Row("a.weight", "exact", ""), Row("b", "step", "b has no exact formula"), Row("c", "exact", "")]
    assert table(rows).splitlines() == [
        "a.weight  exact",
        "b         step   b has no exact formula",
        "c         exact",
        "2 exact, 1 step",
    ]
