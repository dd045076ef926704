"""Step 1, moments: what one backward has brought of one parameter, until its gradient arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gradwire.moments.uses import Use

Passes = dict[int, list[Use]]


@dataclass
class Stage:
    """What one backward (graph task) has brought so far, by forward pass.

    commits: how many had been made when it began; fresh: whether `.grad` was empty then.
    """

    commits: int = -1
    fresh: bool = False
    placed: bool = False  # a use may have written its moment already
    uses: Passes = field(default_factory=dict)
    signed: Passes = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)  # passes of which a reentrant checkpoint recomputed a part
    doubt: str | None = None

    def move_out(self) -> None:
        """What was written where the moment belongs goes elsewhere: another backward commits first."""
        for use in (use for uses in self.uses.values() for use in uses if use.place is not None):
            use.finished = None if use.finished is None else use.finished.clone()


def current_task() -> int:
    return torch._C._current_graph_task_id()
