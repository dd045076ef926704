"""The list of implementations: another one in front, and the place that each is given for the moment."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradwire.moments import Recorder, together

from .oracle import trainable


def test_another_implementation_may_be_put_in_front() -> None:
    seen: list[together.Problem] = []

    def other(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None) -> together.Pair:
        total, moment = together.linear(gradient, x, dtype)
        return total, moment + 1

    def serves(problem: together.Problem) -> bool:
        seen.append(problem)
        return problem.positions == 3

    candidate = together.Candidate(serves, lambda: other)
    together.LINEARS.insert(0, candidate)
    try:
        net, x = nn.Linear(6, 7), torch.randn(20, 3, 6)
        recorder = Recorder(net, trainable(net), strict=True)
        net(x).sum().backward()
        assert (recorder.moment("weight") > 1).all()
        assert seen[0][2:5] == (20, 3, (7, 6))
        recorder.remove()
    finally:
        together.LINEARS.remove(candidate)


def test_a_moment_is_made_where_it_belongs() -> None:
    """Without a copy of the weight's size; and two passes in one backward, or a nested one, do not share the place."""
    net, x = nn.Linear(6, 8), torch.randn(20, 3, 6)
    recorder = Recorder(net, trainable(net), strict=True, same_samples=False)
    ledger, places = recorder.ledgers["weight"], []

    def watched(gradient: Tensor, x: Tensor, dtype: torch.dtype, place: Tensor | None) -> together.Pair:
        places.append(place)
        return together.linear(gradient, x, dtype, place)

    candidate = together.Candidate(together.on_cpu, lambda: watched)
    together.LINEARS.insert(0, candidate)
    try:
        net(x).square().sum().backward()
        assert places[0] is not None
        assert places[0].data_ptr() == ledger.moment.data_ptr()
        one = recorder.moment("weight").clone()
        net.zero_grad()
        recorder.consume("weight", ledger.moment)
        (net(x).square().sum() + net(x).square().sum()).backward()  # two passes: other samples
        assert [place is None for place in places[1:]] == [False, True]
        torch.testing.assert_close(recorder.moment("weight"), 2 * one)
        net(x).square().sum().backward()  # accumulates
        assert places[3] is None
        torch.testing.assert_close(recorder.moment("weight"), 3 * one)
    finally:
        together.LINEARS.remove(candidate)
        recorder.remove()
