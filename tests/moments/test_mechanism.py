"""The taps change nothing else: in-place operations, checkpoints, autocast, copies, pickles, memory, removal."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.errors import AttachError
from gradwire.moments import Recorder
from gradwire.moments.swapped_forward import ATTRIBUTE

from .oracle import assert_equal, by_sample, recorded, trainable


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.LayerNorm(5), nn.Linear(5, 2))


def truth(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(len(x))])


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_both_kinds(reentrant: bool) -> None:
    net = Checkpointed(small(), reentrant).double()
    x = floats(4, 3).requires_grad_()
    wanted = by_sample(net, lambda: [(net.head(net.body(x[b : b + 1]))).square().sum() for b in range(4)])
    assert_equal(recorded(net, lambda: net(x).square().sum()), wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_free_what_the_taps_saved(reentrant: bool) -> None:
    net = Checkpointed(small(), reentrant)
    seen: list[weakref.ref[Tensor]] = []
    net.body[3].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    recorder = Recorder(net, trainable(net))
    loss = net(torch.randn(4, 3, requires_grad=True)).sum()
    gc.collect()
    assert len(seen) == 1
    assert seen[0]() is None, "the input of a checkpointed layer outlives its forward"
    loss.backward()
    assert len(seen) == 2
    recorder.remove()


def test_two_passes_under_a_checkpoint() -> None:
    """A non-reentrant one knows the pass of each use; a reentrant one cannot, and says so instead of guessing."""
    x, y = floats(4, 3).requires_grad_(), floats(4, 3).requires_grad_()
    net = Checkpointed(small(), False).double()
    losses = [lambda b=b, z=z: net(z[b : b + 1]).square().sum() for z in (x, y) for b in range(4)]
    wanted = by_sample(net, lambda: [loss() for loss in losses])
    assert_equal(recorded(net, lambda: net(x).square().sum() + net(y).square().sum(), same_samples=False), wanted)
    net.reentrant = True
    recorder = Recorder(net, trainable(net))
    (net(x).square().sum() + net(y).square().sum()).backward()
    rows = {row.name: row for row in recorder.coverage()}
    assert rows["head.weight"].kind == "exact"
    assert rows["body.0.weight"].kind in ("step", "groups")
    assert "use_reentrant=False" in rows["body.0.weight"].why
    recorder.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_near(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(2), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()
    )
    x = torch.randn(6, 2, 6, 6)
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() for b in range(6)])

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype):
            return net(x).square().sum()

    for name, moment in recorded(net, loss).items():
        assert moment.dtype == torch.float32
        # products of 8 (bfloat16) or 11 (float16) bits, squared
        assert (moment - wanted[name]).norm() < 0.03 * wanted[name].norm(), name
        assert not torch.equal(moment, wanted[name])


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(16, 16), (6, 4, 16)), (nn.Conv1d(16, 16, 1), (6, 16, 4))])
def test_autocast_keeps_no_second_copy_of_an_input(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """The tap saves the very tensor that the layer saves, and not the float32 one beside it."""
    saved: list[Tensor] = []
    recorder = Recorder(layer, trainable(layer))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(torch.randn(shape))
        output.square().sum().backward()
    inputs = [t for t in saved if t.shape == shape and t.grad_fn is None]
    assert {t.dtype for t in inputs} == {torch.bfloat16}
    assert len({t.data_ptr() for t in inputs}) == 1
    recorder.remove()


def test_backward_inside_autocast_squares_in_float32() -> None:
    """Not that it should be called there; torch's own weight gradient loses bits."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 5), torch.randn(4, 6, 3)
    wanted = truth(net, x)
    recorder = Recorder(net, trainable(net))
    loss = net(x).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert_equal({name: recorder.moment(name) for name in wanted}, wanted, 1e-5)
    recorder.remove()


def test_half_precision_squares_do_not_underflow() -> None:
    net = nn.Linear(3, 2).to(torch.float16)
    x = torch.full((2, 3), 1e-4, dtype=torch.float16)
    recorder = Recorder(net, trainable(net))
    (net(x) * 1e-3).sum().backward()
    assert recorder.moment("weight").dtype == torch.float32
    torch.testing.assert_close(recorder.moment("weight"), torch.full((2, 3), 2e-14), rtol=0.02, atol=0)
    recorder.remove()


def test_a_deep_copy_computes_with_its_own_weights_and_records_nothing() -> None:
    net = small().double()
    recorder = Recorder(net, trainable(net))
    ema = copy.deepcopy(net)
    with torch.no_grad():
        for param in ema.parameters():
            param.mul_(2)
    x = floats(4, 3)
    assert not torch.equal(ema(x), net(x))
    plain = small().double()
    plain.load_state_dict(ema.state_dict())
    assert torch.equal(ema(x), plain(x))
    ema(x).sum().backward()
    assert not any(recorder.accounts[name].seen() for name in recorder.accounts)
    # and the copy may get a recorder of its own
    other = Recorder(ema, trainable(ema))
    ema.zero_grad()
    ema(x).square().sum().backward()
    assert_equal({name: other.moment(name) for name in other.accounts}, truth(plain, x))
    other.remove()
    recorder.remove()


def test_a_pickled_model_is_a_plain_model() -> None:
    net = small().double()
    recorder = Recorder(net, trainable(net))
    data = pickle.dumps(net)
    assert b"gradwire" not in data.replace(ATTRIBUTE.encode(), b""), "it must load where gradwire is not installed"
    loaded = pickle.loads(data)
    x = floats(4, 3)
    assert torch.equal(loaded(x), net(x))
    loaded(x).square().sum().backward()
    assert not any(recorder.accounts[name].seen() for name in recorder.accounts)
    again = Recorder(loaded, trainable(loaded), strict=True)
    loaded.zero_grad()
    loaded(x).square().sum().backward()
    assert {row.kind for row in again.coverage()} == {"exact"}
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == net.state_dict().keys()
    again.remove()
    recorder.remove()


def test_remove_restores_everything() -> None:
    net = small()
    before = {name: set(vars(module)) for name, module in net.named_modules()}
    recorder = Recorder(net, trainable(net), estimator="signs")
    assert "forward" in vars(net[0])
    net(torch.randn(4, 3)).sum().backward()
    kept = recorder.moment("0.weight").clone()
    recorder.remove()
    assert {name: set(vars(module)) for name, module in net.named_modules()} == before
    assert not net._forward_pre_hooks
    assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in net.parameters())
    net.zero_grad()
    net(torch.randn(4, 3)).sum().backward()
    assert torch.equal(recorder.moment("0.weight"), kept)
    Recorder(net, trainable(net)).remove()


def test_a_second_recorder_on_one_model_is_refused() -> None:
    net = small()
    recorder = Recorder(net, trainable(net))
    with pytest.raises(AttachError, match=r"'0' \(Linear\) is being recorded already, for another model"):
        Recorder(net, trainable(net))
    recorder.remove()


def test_a_dropped_model_is_freed() -> None:
    net = small()
    recorder = Recorder(net, trainable(net))
    net(torch.randn(4, 3)).sum().backward()
    alive = [weakref.ref(net[0]), weakref.ref(recorder)]
    del net, recorder
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_grad_disabled_and_torch_func_go_the_plain_way() -> None:
    net, x = small().double(), floats(4, 3)
    plain = net(x)
    recorder = Recorder(net, trainable(net), strict=True)
    with torch.no_grad():
        assert torch.equal(net(x), plain)
    values = {name: param.detach() for name, param in net.named_parameters()}

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(net, values, (sample[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
    net(x).square().sum().backward()
    found = {name: recorder.moment(name) for name in recorder.accounts}
    assert_equal(found, {name: value.square().sum(0) for name, value in each.items()})
    other = {name: value.clone().requires_grad_() for name, value in values.items()}
    torch.func.functional_call(net, other, (x,)).sum().backward()
    assert_equal({name: recorder.moment(name) for name in recorder.accounts}, found)
    recorder.remove()


def test_frozen_weights_keep_no_input_for_the_bias() -> None:
    """With only biases trained torch saves no inputs, and neither do we: they may be overwritten."""
    net = nn.Linear(3, 3).double()
    net.weight.requires_grad_(False)
    x = floats(4, 3)
    recorder = Recorder(net, trainable(net), strict=True)
    output = net(x)
    x.zero_()
    output.square().sum().backward()
    torch.testing.assert_close(recorder.moment("bias"), (2 * output.detach()).square().sum(0))
    recorder.remove()
