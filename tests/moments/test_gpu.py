"""Second moments on a GPU: as on the CPU, under autocast, channels_last and torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.moments import Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("full_precision"),
]


class Tied(nn.Module):
    """A token and a position embedding, an encoder, and the token embedding again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(19, 16), nn.Embedding(7, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 19, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.encoder(self.tokens(ids) + self.positions(torch.arange(7, device=ids.device)[None])))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4, stride=2),
        nn.GroupNorm(2, 8),
        nn.ConvTranspose2d(8, 5, 2),
        nn.Flatten(),
        nn.Linear(5 * 4 * 4, 6),
    )


MODELS = {
    "tied transformer": (Tied, lambda: torch.randint(0, 19, (6, 7))),
    "convolutions": (convolutions, lambda: torch.randn(6, 3, 8, 8)),
}


def moments(make, x, device, dtype=None, compiled=False, channels_last=False):
    torch.manual_seed(0)
    model = make().to(device)
    x = x.to(device)
    if channels_last and x.ndim == 4:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    recorder = Recorder(model, dict(model.named_parameters()), strict=True)
    called = torch.compile(model) if compiled else model
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        loss = called(x).float().square().mean()
    loss.backward()
    return {name: recorder.moment(name).double().cpu() for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", ["plain", "channels_last", "autocast", "compiled"])
def test_moments_are_those_of_the_cpu(name, case):
    make, data = MODELS[name]
    x = data()
    expected = moments(make, x, "cpu")
    options = {
        "plain": {},
        "channels_last": {"channels_last": True},
        "autocast": {"dtype": torch.bfloat16},
        "compiled": {"compiled": True},
    }[case]
    ours = moments(make, x, "cuda", **options)
    tolerance = 0.05 if case == "autocast" else 1e-3  # bfloat16 has 8 bits; float32 sums in another order
    scale = max(float(value.mean()) for value in expected.values())
    for key, value in expected.items():
        if float(value.mean()) > 1e-9 * scale:  # a key's bias under softmax has no gradient but rounding
            assert float((ours[key] - value).norm() / value.norm()) < tolerance, key
