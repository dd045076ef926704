"""Step 1, moments: which axis of its tensors is a module's sample: what the caller says with `batch_dim`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from gradwire.moments.layer_table import Layer, layer_of

# the sample axis; None: it has none; "positions": an Embedding whose ids are positions, and get a batch axis
Axis = int | None | Literal["positions"]
BatchDim = Axis | Mapping[str, Axis]
TRANSFORMERS = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def batch_first(module: nn.Module) -> bool:
    """A Transformer module's own layout: that of its first attention."""
    return next((one.batch_first for one in module.modules() if isinstance(one, nn.MultiheadAttention)), True)


def told_axis(batch_dim: BatchDim, name: str) -> tuple[Axis, bool]:
    """(what the caller said, whether of this module): the longest prefix of the name wins."""
    if not isinstance(batch_dim, Mapping):
        return batch_dim, False
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix and prefix in batch_dim:
            return batch_dim[prefix], True
    return batch_dim.get("", 0), False


def inner_of(root: nn.Module) -> nn.Module:
    """The user's model, without DDP's and torch.compile's wrappers."""
    while isinstance(root, nn.parallel.DistributedDataParallel) or hasattr(root, "_orig_mod"):
        inner: Any = root.module if isinstance(root, nn.parallel.DistributedDataParallel) else root._orig_mod
        root = inner
    return root


def root_axis_of(batch_dim: BatchDim, root: nn.Module) -> int | None:
    """The sample axis of what the model is called on: told, or a Transformer's own under any wrappers."""
    axis, _ = told_axis(batch_dim, "")
    root = inner_of(root)
    told = isinstance(batch_dim, Mapping) and "" in batch_dim
    if axis == 0 and not told and isinstance(root, TRANSFORMERS) and not batch_first(root):
        return 1
    return None if axis == "positions" else axis


def axis_of(
    batch_dim: BatchDim, name: str, layer: Layer | None, lineage: Sequence[nn.Module]
) -> tuple[int | None, bool]:
    """(the sample axis of a module, whether the caller named it); lineage: itself and its ancestors, nearest first."""
    told, named = told_axis(batch_dim, name)
    axis = 0 if told == "positions" else told
    if named and axis is None:
        return None, True
    if layer is not None and layer.own_axis is not None:
        return layer.own_axis, named
    for parent in lineage[1:2]:
        if isinstance(parent, nn.MultiheadAttention) and layer_of(parent) is not None:
            return 1, named  # its output projection: inside attention samples come second, whatever batch_first says
    if named:
        return axis, True
    for ancestor in lineage:
        if isinstance(ancestor, TRANSFORMERS):
            return (0 if batch_first(ancestor) else 1), False
    return axis, False


def check_batch_dim(batch_dim: BatchDim, modules: Mapping[str, nn.Module]) -> None:
    """Refuses negative axes and names that no module has: a typing error must not become an estimate."""
    entries = batch_dim if isinstance(batch_dim, Mapping) else {"": batch_dim}
    for name, axis in entries.items():
        if name and name not in modules:
            near = ", ".join(sorted(modules.keys() - {""})[:8])
            raise ValueError(f"batch_dim names {name!r}, but the model has no such module; it has: {near}, ...")
        if axis == "positions":
            if not name or not isinstance(modules[name], nn.Embedding):
                kind = type(modules[name]).__name__ if name in modules else "model"
                raise ValueError(f'batch_dim "positions" is for an Embedding by its name, but {name!r} is a {kind}')
        elif axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
            raise ValueError(f'batch_dim must be a dim, None or "positions", but is {axis!r} for {name!r}')
        elif axis is not None and axis < 0:
            raise ValueError(f"batch_dim must count from the front, but is {axis} for {name!r}; give a dim >= 0")
