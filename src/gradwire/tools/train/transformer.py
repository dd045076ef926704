"""A small byte-level transformer of the GPT kind: pre-norm, causal, learned positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # every byte is a token


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
    """Predicts the next byte; tokens int64 [B, T] -> logits [B, T, 256]."""

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
