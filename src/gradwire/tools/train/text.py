"""Task `text`: a byte-level transformer on any file; the last 5 % of it are held out. Reports bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.state.durable_files import sha256
from gradwire.tools.input_errors import InputError
from gradwire.tools.train.task import Task, TaskKind

CONTEXT = 128
VOCABULARY = 256  # every byte is a token
VALIDATION_SHARE = 0.05
VALIDATION_WINDOWS = 512  # at most, evenly spaced: 64 kB are enough to tell runs apart and take a second
EVALUATION_BATCH = 32


class Attention(nn.Module):
    """Causal self-attention; x [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.perceptron(self.perceptron_norm(x))
        return out


class ByteTransformer(nn.Module):
    """Predicts the next byte: tokens int64 [B, T] -> logits [B, T, 256]. Pre-norm, causal, with learned positions."""

    def __init__(self, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        # [1, T] and not [T]: so its second moment is exact, see docs/architecture.md
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))
        return logits


def _initialise(module: nn.Module) -> None:
    """GPT-2's initialisation: deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@dataclass(frozen=True)
class Text:
    """Non-overlapping windows of `context` bytes, each with its next byte. The file is mapped, never read whole."""

    content: Tensor  # uint8
    path: Path
    context: int = CONTEXT
    width: int = 128
    heads: int = 4
    depth: int = 4
    name: str = "text"
    scores: tuple[str, ...] = ("bits_per_byte", "val_loss")

    @property
    def boundary(self) -> int:
        """Where the held-out part begins."""
        return len(self.content) - max(self.context + 1, int(len(self.content) * VALIDATION_SHARE))

    @property
    def samples(self) -> int:
        return (self.boundary - 1) // self.context

    def fingerprint(self) -> str:
        return sha256(self.path)

    def on(self, device: torch.device) -> Text:
        return replace(self, content=self.content.to(device))

    def make_model(self) -> nn.Module:
        """875,264 parameters, unless told otherwise."""
        return ByteTransformer(self.context, self.width, self.heads, self.depth)

    def windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes [B, context] from each start on, and the same moved by one."""
        tokens = self.content[starts[:, None] + torch.arange(self.context + 1, device=starts.device)].long()
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.windows(indices * self.context)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, share: slice = slice(None)) -> Tensor:
        device = next(model.parameters()).device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        available = (len(self.content) - self.boundary - 1) // self.context
        numbers = torch.arange(0, available, max(1, available // VALIDATION_WINDOWS), device=self.content.device)
        starts = self.boundary + numbers[:VALIDATION_WINDOWS] * self.context
        for part in torch.split(starts[share], EVALUATION_BATCH):
            if len(part):  # more workers than windows leave some without any
                inputs, targets = (tensor.to(device) for tensor in self.windows(part))
                totals[0] += self.loss(model(inputs), targets).double() * targets.numel()
                totals[1] += targets.numel()
        return totals

    def score(self, totals: Tensor) -> dict[str, float]:
        loss = float(totals[0] / totals[1])
        return {"bits_per_byte": loss / math.log(2), "val_loss": loss}


def open_text(data: Path | None) -> Task:
    """Map the file `data`; it must hold at least one window to train on and one to test on."""
    if data is None:
        raise InputError("task text needs --data FILE, any text of a few hundred kilobytes or more")
    if not data.is_file():
        raise InputError(f"text: --data {data} is not a file")
    size, needed = data.stat().st_size, 2 * (CONTEXT + 1)
    if size < needed:
        state = "is empty" if size == 0 else f"has {size} bytes"
        raise InputError(f"text: --data {data} {state}; at least {needed} bytes are needed, some 100,000 make sense")
    return Text(torch.from_numpy(np.memmap(data, dtype=np.uint8, mode="c")), data)


KIND = TaskKind(name="text", about="--data FILE, a byte-level transformer", open=open_text, epochs=1, batch=16)
