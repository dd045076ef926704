"""Step 1, moments: MultiheadAttention, whose projections are Linears called inside one function, where no tap fits."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments.joined_uses import Slice
from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.layer_function import run_layer
from gradwire.moments.layer_table import Formula, Layer, Uses, add
from gradwire.moments.layers.linear import Positions
from gradwire.moments.operations import Multiply
from gradwire.moments.swapped_forward import autocast_input, watch
from gradwire.moments.uses import Direct, Doubt, Use

# part -> (first third of in_proj, number of thirds)
THIRDS = {"qkv": (0, 3), "q": (0, 1), "k": (1, 1), "v": (2, 1), "kv": (1, 2)}
WHOLE = Multiply(("in_proj_weight", "in_proj_bias"))
Masks = tuple[Tensor | None, Tensor | None]


def projection(part: str, module: nn.MultiheadAttention, g: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """As Linear, on the rows of in_proj that this projection uses, or on its own weight where kdim or vdim differ."""
    first, thirds = THIRDS[part]

    def placed(use: Use) -> Use:
        width = module.embed_dim
        return use if thirds == 3 else Slice(use, first * width, thirds * width, 3 * width)

    own = f"{part}_proj_weight"
    if own in call.wanted:
        yield own, Positions(call.positions(g), call.positions(saved[0]))
    if "in_proj_weight" in call.wanted:
        yield "in_proj_weight", placed(Positions(call.positions(g), call.positions(saved[0])))
    if "in_proj_bias" in call.wanted:
        yield "in_proj_bias", placed(Direct(call.sums(g)))


def added(name: str, module: nn.MultiheadAttention, g: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """bias_k, bias_v [1, 1, E]: one more position, expanded to the batch."""
    yield name, Direct(call.sums(g)[:, None, None])


def refused(module: nn.MultiheadAttention, g: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    raise Doubt("its query has no batch axis (it is not 3-dimensional)")


def project(module: nn.MultiheadAttention, tap: Tap, x: Tensor, part: str) -> list[Tensor]:
    """x [T, B, E] times the rows of `part`, watched; a contiguous tensor a third, in torch's own memory order."""
    first, thirds = THIRDS[part]
    output = run_layer(module, tap, x, part, WHOLE) if thirds == 3 else None
    if output is None:
        rows = slice(first * module.embed_dim, (first + thirds) * module.embed_dim)
        packed, bias = module.in_proj_weight, module.in_proj_bias
        weight = packed[rows] if packed is not None else getattr(module, f"{part}_proj_weight")
        x = autocast_input(x)
        needs_input = any(name.endswith("weight") for name in tap.wanted())
        output = F.linear(x, weight, None if bias is None else bias[rows])
        output = watch(tap, output, (x,) if needs_input else (), part)
    if thirds == 1:
        return [output]
    apart = output.view(*output.shape[:-1], thirds, module.embed_dim).unsqueeze(0)
    apart = apart.transpose(0, -2).squeeze(-2).contiguous()
    return [apart[third] for third in range(thirds)]


def project_all(module: nn.MultiheadAttention, tap: Tap, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """q, k, v; one multiplication for inputs that are one tensor, as torch does it."""
    if module.in_proj_weight is not None and key is value:
        if query is key:
            return project(module, tap, query, "qkv")
        return [*project(module, tap, query, "q"), *project(module, tap, key, "kv")]
    return [project(module, tap, x, part)[0] for x, part in ((query, "q"), (key, "k"), (value, "v"))]


def canonical(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bool mask as zeros and -inf, to be added."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def one_longer(masks: Masks) -> Masks:
    """Masks for one more key that everybody sees."""
    attention, padding = (None if mask is None else F.pad(mask, (0, 1)) for mask in masks)
    return attention, padding


def merged_mask(masks: Masks, heads: int) -> Tensor | None:
    """[L, S] or [B*H, L, S], and [B, S] -> one mask [1 or B*H, 1 or L, S]."""
    attention, padding = masks
    if attention is not None and attention.ndim == 2:
        attention = attention.unsqueeze(0)
    if padding is None:
        return attention
    batch, length = padding.shape
    padding = padding.view(batch, 1, 1, length).expand(-1, heads, -1, -1).reshape(batch * heads, 1, length)
    return padding if attention is None else attention + padding


def with_bias(module: nn.MultiheadAttention, tap: Tap, k: Tensor, v: Tensor) -> list[Tensor]:
    """k, v and one more position, bias_k and bias_v, the same for all samples."""
    longer = []
    for name, x in (("bias_k", k), ("bias_v", v)):
        bias: Tensor = getattr(module, name)
        extra = bias.repeat(1, x.shape[1], 1)
        longer.append(torch.cat([x, watch(tap, extra, (), name) if name in tap.wanted() else extra]))
    return longer


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[L, B, E] -> [B*H, L, d]."""
    return x.view(x.shape[0], x.shape[1] * heads, x.shape[2] // heads).transpose(0, 1)


def attend(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, weights: bool, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """(softmax(q k^T / sqrt(d) + mask) v as [L, B, E], the softmax where asked for as [B, H, L, S]).

    q [B*H, L, d], k, v [B*H, S, d]. Operation by operation as torch, down to the memory order, which dropout follows.
    """
    dropout, heads = (module.dropout if module.training else 0.0), module.num_heads
    batch, length, source = q.shape[0] // heads, q.shape[1], k.shape[1]
    if not weights:
        if mask is not None:
            mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.view(batch, heads, -1, source)
        q, k, v = (x.view(batch, heads, *x.shape[1:]) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        return mixed.permute(2, 0, 1, 3).contiguous().view(length, batch, module.embed_dim), None
    scaled, turned = q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1)
    scores = torch.bmm(scaled, turned) if mask is None else torch.baddbmm(mask, scaled, turned)
    probabilities = scores.softmax(-1)
    if dropout > 0.0:
        probabilities = F.dropout(probabilities, dropout)
    mixed = torch.bmm(probabilities, v).transpose(0, 1).reshape(length, batch, module.embed_dim)
    return mixed, probabilities.view(batch, heads, length, source)


def turned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, E] <-> [T, B, E]; what was one tensor stays one, and is projected at once."""
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k if value is key else value.transpose(0, 1)


def attention_forward(
    module: nn.MultiheadAttention,
    tap: Tap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """MultiheadAttention.forward from tapped projections; torch's own bit for bit. Inside it samples come second."""
    if query.ndim != 3 or query.is_nested:
        flags = (need_weights, attn_mask, average_attn_weights, is_causal)
        output, found = type(module).forward(module, query, key, value, key_padding_mask, *flags)
        return watch(tap, output, (), "unbatched"), found
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal is only a hint: give the attn_mask that it describes")
    causal = is_causal and key_padding_mask is None and not need_weights
    masks = (None if causal else canonical(attn_mask, query.dtype), canonical(key_padding_mask, query.dtype))
    if module.batch_first:
        query, key, value = turned(query, key, value)
    q, k, v = project_all(module, tap, query, key, value)
    if module.bias_k is not None:
        k, v = with_bias(module, tap, k, v)
        masks = one_longer(masks)
    q, k, v = (split_heads(x, module.num_heads) for x in (q, k, v))
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], 1) for x in (k, v))
        masks = one_longer(masks)
    mixed, probabilities = attend(module, q, k, v, merged_mask(masks, module.num_heads), need_weights, causal)
    output = module.out_proj(mixed)
    if probabilities is not None and average_attn_weights:
        probabilities = probabilities.mean(1)
    return output.transpose(0, 1) if module.batch_first else output, probabilities


FORMULAS: dict[str, Formula] = {part: partial(projection, part) for part in THIRDS}
FORMULAS |= {name: partial(added, name) for name in ("bias_k", "bias_v")}
FORMULAS["unbatched"] = refused
PARAMETERS = (
    *("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("bias_k", "bias_v"),
)
# own_axis: of its projections, whatever batch_first says
add(Layer(FORMULAS, PARAMETERS, attention_forward, own_axis=1), nn.MultiheadAttention)
