"""Whole models against single samples: every parameter of GPT-2, of torch's Transformer, and of a small ResNet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from gradwire.moments import Recorder, per_sample

from .oracle import assert_equal, by_sample, recorded, trainable

# A product of float64 roundings through a whole model, most of it in normalizations whose gradients cancel.
RTOL = 1e-10


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_gpt2_with_tied_weights_and_positions_without_a_batch_axis() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=23, n_positions=12, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    net = GPT2LMHeadModel(config).double().train()
    assert net.lm_head.weight is net.transformer.wte.weight
    ids = torch.randint(0, 23, (4, 9))

    def loss(batch: Tensor) -> Tensor:
        logits = net(input_ids=batch).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")

    wanted = by_sample(net, lambda: [loss(ids[b : b + 1]) / 4 for b in range(4)])
    assert_equal(recorded(net, lambda: loss(ids) / 4), wanted, RTOL)


@pytest.mark.parametrize("first", [True, False])
def test_transformer_encoder_by_its_own_batch_first(first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=first, norm_first=not first)
    net = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False).double()
    # 3 samples of 3 positions: the wrong axis would fit, and be wrong
    x, axis = floats(3, 3, 8), 0 if first else 1
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)

    def losses() -> list[Tensor]:
        return [net(x.narrow(axis, b, 1), mask=mask, is_causal=True).pow(3).sum() for b in range(3)]

    found = recorded(net, lambda: net(x, mask=mask, is_causal=True).pow(3).sum(), batch_dim=axis)
    assert_equal(found, by_sample(net, losses), RTOL)


def test_samples_first_outside_and_second_inside() -> None:
    """The model takes [B, T] and turns it round for an encoder that wants [T, B, E]."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 3)
            self.position = nn.Parameter(torch.randn(1, 4, 8))
            self.encoder = nn.TransformerEncoderLayer(8, 2, 12, 0.0)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            x = x + per_sample(self.position, x)
            return self.head(self.encoder(x.transpose(0, 1)).transpose(0, 1))

    net, ids = Model().double(), torch.randint(0, 7, (4, 4))
    wanted = by_sample(net, lambda: [net(ids[b : b + 1]).pow(3).sum() for b in range(4)])
    assert_equal(recorded(net, lambda: net(ids).pow(3).sum()), wanted, RTOL)


def test_transformer_decoder_layer_with_padding() -> None:
    torch.manual_seed(0)
    net = nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True).double()
    target, memory = floats(3, 4, 8), floats(3, 5, 8)
    hidden = torch.arange(5)[None] >= torch.tensor([5, 3, 4])[:, None]

    def run(rows: slice) -> Tensor:
        return net(target[rows], memory[rows], memory_key_padding_mask=hidden[rows]).pow(3).sum()

    wanted = by_sample(net, lambda: [run(slice(b, b + 1)) for b in range(3)])
    assert_equal(recorded(net, lambda: run(slice(0, 3))), wanted, RTOL)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.norms[0](self.first(x)))
        inner = self.norms[1](self.second(inner))
        inner += self.short(x)
        return self.relu(inner)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return nn.Sequential(*stem, Block(4, 4, 1), Block(4, 8, 2), *head).double()


def test_resnet_with_frozen_statistics() -> None:
    net, x = resnet().eval(), floats(4, 3, 8, 8)
    wanted = by_sample(net, lambda: [net(x[b : b + 1]).square().sum() / 4 for b in range(4)])
    assert_equal(recorded(net, lambda: net(x).square().sum() / 4), wanted, RTOL)


def test_resnet_with_batch_norm_in_training_goes_by_activation_index() -> None:
    """c_b = what flows back through sample b's activations: by definition, from the output gradients of each layer."""
    net, x = resnet().train(), floats(4, 3, 8, 8)
    kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        output.retain_grad()
        kept[module] = (args[0].detach().clone(), output)
        return output.clone()  # for the in-place operations that follow

    handles = [m.register_forward_hook(keep) for m in net.modules() if not list(m.children())]
    net(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    wanted = {name: torch.zeros_like(param) for name, param in net.named_parameters()}
    for path, module in net.named_modules():
        if not module._parameters:
            continue
        inputs, output = kept[module]
        assert output.grad is not None
        for b in range(4):
            for name, value in activation_gradients(module, inputs, output.grad, b).items():
                wanted[f"{path}.{name}"] += value.square()
    state = {name: buffer.clone() for name, buffer in net.named_buffers()}
    recorder = Recorder(net, trainable(net), strict=True)
    net.zero_grad()
    net(x).square().sum().backward()
    found = {name: recorder.moment(name) for name in recorder.accounts}
    assert_equal(found, wanted, RTOL)
    kinds = {row.name: row.kind for row in recorder.coverage()}
    assert kinds["2.norms.0.weight"] == "by activation"
    assert kinds["2.first.weight"] == "exact"
    assert not torch.equal(state["2.norms.0.running_mean"], net.get_buffer("2.norms.0.running_mean")), "still trains"
    recorder.remove()


def activation_gradients(module: nn.Module, x: Tensor, gradient: Tensor, b: int) -> dict[str, Tensor]:
    """The gradient of a layer's parameters when only sample b's output gradient flows back, inputs held."""
    only = torch.zeros_like(gradient)
    only[b] = gradient[b]
    names = dict(module.named_parameters())
    if isinstance(module, nn.BatchNorm2d):
        axes = (0, 2, 3)
        spread = x.var(axes, unbiased=False, keepdim=True)
        normalized = (x - x.mean(axes, keepdim=True)) / (spread + module.eps).sqrt()
        return {"weight": (only * normalized).sum(axes), "bias": only.sum(axes)}
    found = torch.autograd.grad(module(x), list(names.values()), only)
    return dict(zip(names, found, strict=True))
