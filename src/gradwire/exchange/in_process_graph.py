"""Steps 2 to 6 of W workers in one process as one CUDA graph, for methods whose steps are all alike.

Their Python takes longer than the GPU: a PowerSGD of eight workers launches thousands of small kernels a step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.arithmetic.finite import sifted
from gradwire.codec.header import WORD_BYTES
from gradwire.compile.capture_guard import calm
from gradwire.methods.base import Context, Outcome, Rounds, said_by
from gradwire.methods.fixed import Body, Fixed

T = TypeVar("T")
FIRST = 2  # steps without a graph: they make the tables that are kept on the device


@dataclass
class Made:
    """What a replay writes, in memory that the next one writes again."""

    mean: Tensor  # [N]
    finite: Tensor  # bool []
    n_bytes: int  # of one worker
    undo: list[Callable[[], None]]
    sent: Sequence[Any]  # with what the statistics need


def repeats(compressor: Any, device: torch.device) -> bool:
    """Whether a step of it can be captured."""
    known = isinstance(compressor, Rounds | Fixed) and getattr(compressor, "alike", False)
    return device.type == "cuda" and bool(known)


class Repeated:
    """Captures a step the first time it is called, and replays it from then on."""

    def __init__(self, compressor: Any, states: Sequence[Any], n_head: int) -> None:
        """n_head: words of a message before its body."""
        self.compressor, self.states, self._n_head = compressor, states, n_head
        self._streams = [torch.cuda.Stream() for _ in states]  # type: ignore[no-untyped-call]
        self._graph: Any = None

    def __call__(self, grads: Tensor, context: Context) -> Made:
        """grads [W, N]: the same memory every time."""
        if self._graph is None:
            self._grads, self._graph = grads, torch.cuda.CUDAGraph()
            with calm(), torch.cuda.graph(self._graph):
                rounds = self.compressor.kind == "rounds"
                self._made = self._converse(grads, context) if rounds else self._gather(grads, context)
        assert grads.data_ptr() == self._grads.data_ptr()
        self._graph.replay()
        return self._made

    def _each(self, work: Callable[[int], T]) -> list[T]:
        """Every worker's on a branch of its own."""
        main, made = torch.cuda.current_stream(), []
        for rank, stream in enumerate(self._streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                made.append(work(rank))
        for stream in self._streams:
            main.wait_stream(stream)
        return made

    def _gather(self, grads: Tensor, context: Context) -> Made:
        """As encode and decode do it, without heads."""

        def write(rank: int) -> tuple[Body, Tensor]:
            good, finite = sifted(grads[rank])
            return self.compressor.write(good.clone(), self.states[rank], replace(context, rank=rank)), finite

        made = self._each(write)
        bodies, mean = torch.stack([body.words for body, _ in made]), torch.zeros_like(grads[0])
        said, _ = self.compressor.read(bodies, context)
        self.compressor.add_all(said, mean, context)
        finite, sent = torch.stack([finite for _, finite in made]).all(), [body for body, _ in made]
        n_bytes = WORD_BYTES * (self._n_head + bodies.shape[1])
        return Made(mean, finite, n_bytes, [body.undo for body in sent], sent)

    def _converse(self, grads: Tensor, context: Context) -> Made:
        talks = [
            self.compressor.rounds(grad, state, replace(context, rank=rank))
            for rank, (grad, state) in enumerate(zip(grads, self.states, strict=True))
        ]
        outcomes, n_bytes = converse(talks, self._each)
        first = outcomes[0]
        return Made(first.mean, first.finite, n_bytes, [one.undo for one in outcomes], outcomes)


def converse(
    talks: Sequence[Generator[Tensor, Tensor, Outcome]], each: Callable[..., list[Any]] | None = None
) -> tuple[list[Outcome], int]:
    """The rounds of all workers, sum by sum, and the bytes that one of them gave to the sums.

    each: runs what it is given for every rank; one after another without it.
    """
    run = each or (lambda work: [work(rank) for rank in range(len(talks))])
    said, n_bytes = run(lambda rank: said_by(talks[rank], None)), 0
    while isinstance(said[0], Tensor):
        n_bytes += said[0].numel() * said[0].element_size()
        total = torch.stack(said).sum(0)
        said = run(lambda rank, total=total: said_by(talks[rank], total.clone()))
    return said, n_bytes
