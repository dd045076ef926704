"""The buffers of all workers in local steps: batch statistics are averaged in a round, or left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import CheckpointError
from gradwire.local_steps.batch_statistics import statistics_of


class WorkerBuffers:
    """Statistics as real workers average them; tables and counters stay each worker's.

    averages: with it the model has the mean of the last round; without it worker 0 writes to the model's own.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], averages: bool) -> None:
        self.model, self.modules, self.averages = model, modules, averages
        self.base = {name: buffer.clone() for name, buffer in statistics_of(model).items()}  # as of the last round
        self._sent_from: list[dict[str, Tensor]] | None = None  # by worker, of a round on its way
        self._mean: dict[str, Tensor] = {}

    @property
    def n_bytes(self) -> int:
        """That a worker gives in a round."""
        return sum(buffer.nbytes for buffer in self.base.values()) if self.averages else 0

    def take(self, delay: int) -> None:
        """The mean over the workers whose statistics are finite; as they were where there is none."""
        if not self.averages:
            return
        own = [statistics_of(module) for module in self.modules]
        sound = [one for one in own if all(bool(torch.isfinite(buffer).all()) for buffer in one.values())]
        means = {name: torch.stack([one[name] for one in sound]).sum(0) / len(sound) for name in self.base if sound}
        self._mean = means or dict(self.base)
        self._sent_from = _copies(own) if delay else None

    @torch.no_grad()
    def land(self) -> None:
        """buffer = mean, and with a delay what it has changed by in the meantime."""
        if not self.averages:
            return
        for rank, module in enumerate(self.modules):
            for name, buffer in statistics_of(module).items():
                since = torch.zeros_like(buffer) if self._sent_from is None else buffer - self._sent_from[rank][name]
                buffer.copy_(self._mean[name] + torch.where(torch.isfinite(since), since, 0.0))
        self.base, self._mean, self._sent_from = self._mean, {}, None
        first = dict(self.modules[0].named_buffers())
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.base.get(name, first[name]))

    @torch.no_grad()
    def restart(self, rank: int) -> None:
        """What is not finite in a worker that went wrong becomes what it was after the last round."""
        for name, buffer in statistics_of(self.modules[rank]).items():
            if not bool(torch.isfinite(buffer).all()):
                buffer.copy_(self.base[name])
                if self._sent_from is not None:
                    self._sent_from[rank][name] = self.base[name].clone()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": _copies([dict(self.model.named_buffers())])[0],
            "workers": _copies([dict(module.named_buffers()) for module in self.modules]),
            "base": _copies([self.base])[0],
            "mean": _copies([self._mean])[0],
            "sent_from": None if self._sent_from is None else _copies(self._sent_from),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        modules = [self.model, *self.modules]
        for module, saved in zip(modules, [state["model"], *state["workers"]], strict=True):
            ours = dict(module.named_buffers())
            if ours.keys() != saved.keys():
                raise CheckpointError(f"the state has buffers {sorted(saved)}, the model {sorted(ours)}")
            for name, buffer in ours.items():
                buffer.copy_(saved[name])
        device = {name: buffer.device for name, buffer in self.model.named_buffers()}
        self.base, self._mean = ({n: b.to(device[n]) for n, b in state[key].items()} for key in ("base", "mean"))
        sent = state["sent_from"]
        self._sent_from = None if sent is None else [{n: b.to(device[n]) for n, b in one.items()} for one in sent]


def _copies(rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: buffer.clone() for name, buffer in one.items()} for one in rows]
