"""MultiheadAttention under a tap computes what torch computes: outputs, weights, gradients, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.moments import Recorder

from ..oracle import trainable

BATCH, SOURCE, TARGET = 3, 5, 4


def masks(length: int) -> dict[str, dict[str, Any]]:
    hidden = torch.zeros(length, SOURCE, dtype=torch.bool)
    hidden[0, 2] = hidden[2, 0] = True
    padding = torch.arange(SOURCE)[None] >= torch.tensor([5, 3, 4])[:, None]
    causal = torch.ones(length, SOURCE).triu(1).bool()
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(length, SOURCE)},
        "per head": {"attn_mask": torch.randn(BATCH * 2, length, SOURCE)},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.randn(BATCH, SOURCE)},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal and padding": {"attn_mask": causal, "key_padding_mask": padding, "is_causal": True},
    }


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "added bias": {"add_bias_kv": True, "add_zero_attn": True},
    "other sizes": {"kdim": 3, "vdim": 7},
    "dropout": {"dropout": 0.4},
}


def outputs(net: nn.Module, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The output, the weights where given, and all gradients, of the parameters and of the inputs."""
    torch.manual_seed(7)  # for the dropout
    leaves = [x.clone().requires_grad_() for x in dict.fromkeys(inputs)]
    same = dict(zip(dict.fromkeys(inputs), leaves, strict=True))
    output, weights = net(*(same[x] for x in inputs), **kwargs)
    net.zero_grad()
    output.square().sum().backward()
    found = [output, *([] if weights is None else [weights])]
    return found + [x.grad for x in leaves] + [param.grad for param in net.parameters()]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("mask", masks(TARGET))
@pytest.mark.parametrize(
    ("layer", "how"),
    [(layer, how) for layer in LAYERS for how in ("self", "cross") if (layer, how) != ("other sizes", "self")],
)
def test_equal_to_torch(layer: str, mask: str, how: str, first: bool) -> None:
    torch.manual_seed(0)
    net = nn.MultiheadAttention(4, 2, batch_first=first, **LAYERS[layer])

    def sequence(length: int, features: int = 4) -> Tensor:
        return torch.randn(*((BATCH, length) if first else (length, BATCH)), features)

    memory = sequence(SOURCE)
    if how == "self":
        inputs, length = (memory, memory, memory), SOURCE
    elif layer == "other sizes":
        inputs, length = (sequence(TARGET), sequence(SOURCE, 3), sequence(SOURCE, 7)), TARGET
    else:
        inputs, length = (sequence(TARGET), memory, memory), TARGET
    for weights in ({"need_weights": True}, {"average_attn_weights": False}, {"need_weights": False}):
        kwargs = {**masks(length)[mask], **weights}
        plain = outputs(net, inputs, kwargs)
        recorder = Recorder(net, trainable(net), strict=True, batch_dim=0 if first else 1)
        watched = outputs(net, inputs, kwargs)
        recorder.remove()
        assert len(plain) == len(watched)
        of_parameters = len(plain) - len(list(net.parameters()))
        for place, (a, b) in enumerate(zip(plain, watched, strict=True)):
            assert b.stride() == a.stride()
            if place < of_parameters:
                assert torch.equal(b, a)
            else:
                assert_rounded(b, a)


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """Weight gradients are summed sample by sample: torch's own up to rounding, 4 ulp of the largest."""
    assert (found - wanted).abs().max() <= 5e-7 * wanted.abs().max()


@pytest.mark.parametrize("first", [True, False])
def test_an_encoder_layer_with_dropout_is_torchs(first: bool) -> None:
    """Dropout behind attention draws its mask in memory order."""
    torch.manual_seed(0)
    net, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=first), torch.randn(3, 5, 8)

    def found() -> list[Tensor]:
        torch.manual_seed(3)
        net.zero_grad()
        output = net(x)
        output.pow(3).sum().backward()
        return [output.detach().clone(), *(param.grad.clone() for param in net.parameters())]

    plain = found()
    recorder = Recorder(net, trainable(net), strict=True)
    watched = found()
    assert torch.equal(plain[0], watched[0])
    for a, b in zip(plain[1:], watched[1:], strict=True):
        assert_rounded(b, a)
    recorder.remove()


def test_is_causal_alone_is_refused_as_torch_does() -> None:
    net, x = nn.MultiheadAttention(4, 2), torch.randn(5, 3, 4)
    recorder = Recorder(net, trainable(net), batch_dim=1)
    with pytest.raises(RuntimeError, match="give the attn_mask that it describes"):
        net(x, x, x, is_causal=True)
    recorder.remove()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_an_empty_batch_has_a_moment_of_zero(batch_first: bool, need_weights: bool) -> None:
    """Where torch itself accepts one: it refuses a padding mask of an empty batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = self.attention(x, x, x, need_weights=need_weights)[0]
            return mixed

    model = Model()
    recorder = Recorder(model, dict(model.named_parameters()), batch_dim=0 if batch_first else 1, strict=True)
    model(torch.randn(*((0, 5, 8) if batch_first else (5, 0, 8)))).sum().backward()
    assert {row.kind for row in recorder.coverage()} == {"exact"}
    assert all(recorder.moment(name).eq(0).all() for name, _ in model.named_parameters())
