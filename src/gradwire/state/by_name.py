"""The state of one model: at rest by parameter name, in flight flat per bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradwire.exchange.pipeline import Bucket
from gradwire.layout import Layout
from gradwire.methods.base import SAME, Compressor, of_slot, powers


class Store:
    """Keeps every parameter's state through rebuilt buckets, checkpoints and changed compressors."""

    def __init__(self, bind: Callable[[str, Tensor], None]) -> None:
        self._bind = bind  # tells the recorder where a parameter's moment goes
        self.buckets: dict[Layout, Bucket] = {}
        self._fields: dict[str, dict[str, Tensor]] = {}  # by parameter, by state field: views of the flat tensors
        self.powers: dict[str, int] = {}  # by state field: how it goes over to another number of workers

    def bucket(self, layout: Layout, compressor: Compressor, device: torch.device) -> Bucket:
        """Lays out the flat tensors of a new layout; what is known of its parameters is carried over."""
        moment = torch.zeros(layout.numel if compressor.needs_moments else 0, dtype=torch.float32, device=device)
        bucket = Bucket(layout, compressor.init(layout, device), moment)
        self.powers = powers(bucket.state)
        names = set(layout.names)
        for slot in layout.slots:
            if compressor.needs_moments:
                self._bind(slot.name, slot.of(moment))
            views = of_slot(bucket.state, slot)
            for field, old in self._fields.get(slot.name, {}).items():
                # a field of another compressor, or of another size, means nothing here and is dropped
                if field in views and old.shape == views[field].shape:
                    views[field].copy_(old)
            self._fields[slot.name] = views
        self.buckets = {old: kept for old, kept in self.buckets.items() if names.isdisjoint(old.names)}
        self.buckets[layout] = bucket
        return bucket

    def items(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(parameter, its state fields as 1-D views)."""
        return iter(self._fields.items())

    def residuals(self) -> list[Tensor]:
        """What is held back, parameter by parameter."""
        return [fields["residual"] for fields in self._fields.values() if "residual" in fields]

    def prune(self) -> None:
        """Forgets the parameters that hold nothing back."""
        held = {name: f for name, f in self._fields.items() if "residual" in f and bool(f["residual"].any())}
        # which ones these are differs from rank to rank: what must be the same on all of them begins anew
        alike = {field for field, power in self.powers.items() if power == SAME}
        self._fields = {name: {f: v for f, v in fields.items() if f not in alike} for name, fields in held.items()}

    def set(self, fields: dict[str, dict[str, Tensor]], powers: dict[str, int]) -> None:
        """Replaces everything; the next bucket lays it out."""
        self.buckets.clear()
        self._fields, self.powers = fields, powers
