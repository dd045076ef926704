"""Step 1, moments: what a backward brings while it is captured, in memory that every replay writes to again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gradwire.moments.joined_uses import Disjoint, Settled, by_samples, merge
from gradwire.moments.layer_call import LayerCall
from gradwire.moments.passes import quietly
from gradwire.moments.uses import Doubt, Use

if TYPE_CHECKING:
    from gradwire.moments.account import Account, ByPass
    from gradwire.moments.recorder import Recorder


class CapturedMoments:
    """Takes the uses of a backward as they are reported; nothing is committed while it is there."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.uses: dict[str, ByPass] = {}
        self.moments: dict[str, Settled] = {}
        self.doubts: dict[str, str] = {}
        self._checks = False

    def take(self, account: Account, passed: int, use: Use) -> None:
        """Finished at once, so that what it was made of is free again, unless others have to be merged with it."""
        passes = self.uses.setdefault(account.name, {})
        if passes and not account.shared:
            account.shared = True
            raise Doubt("used more than once in a backward, which the one before had not shown")
        passes.setdefault(passed, []).append(use if account.shared else self._settled(account, use))

    def _settled(self, account: Account, use: Use) -> Settled:
        with quietly(account.param.device):  # at the end of a backward the caller's autocast is on
            finished = account.settled(use, self._checks)
        finished.proven = not self._checks
        return finished

    def finish(self) -> None:
        """At the end of a backward, still captured: what had to wait for all uses of a parameter."""
        self.moments = {}
        for name, passes in self.uses.items():
            account = self.recorder.accounts[name]
            try:
                apart = [merge(uses) for uses in by_samples(passes, self.recorder.passes.same_samples)]
                merged = apart[0] if len(apart) == 1 else Disjoint(apart)
                self.moments[name] = merged if isinstance(merged, Settled) else self._settled(account, merged)
            except Doubt as doubt:
                self.doubts[name] = str(doubt)
        self.uses = {}

    def survey(self, run: Callable[..., Any], sample: Sequence[Tensor]) -> None:
        """Two passes that are not captured: who is used twice, and whether the uses add up to the gradient."""
        trained = {name: one.param for name, one in self.recorder.accounts.items() if one.param.requires_grad}
        for checks in (False, True):
            self._checks, self.doubts = checks, {}
            outputs = [one for one in pytree.tree_leaves(run(*sample)) if one.requires_grad]
            noise = [torch.randn_like(one) for one in outputs]
            found = torch.autograd.grad(outputs, list(trained.values()), noise, allow_unused=True)
        for name, gradient in zip(trained, found, strict=True):
            self._check(name, gradient)
        self._checks = False

    def _check(self, name: str, gradient: Tensor | None) -> None:
        account, finished = self.recorder.accounts[name], self.moments.get(name)
        if gradient is None or finished is None:
            return
        try:
            account.compare([finished], gradient, finished.finished)
        except Doubt as doubt:
            self.doubts[name] = str(doubt)

    def complete(self) -> bool:
        """Whether all parameters have an exact moment here, so that none of them has to be watched by itself."""
        accounts = self.recorder.accounts
        found = self.moments.keys() - self.doubts.keys()
        return found == accounts.keys() and not any(account.estimated for account in accounts.values())

    def commit(self, passed: int, names: Sequence[str]) -> None:
        """After a replay, before its gradients are accumulated: the moments of all of them in one go."""
        begin: list[tuple[Tensor, Tensor]] = []
        go_on: list[tuple[Tensor, Tensor]] = []
        for name in names:
            account, finished = self.recorder.accounts[name], self.moments[name]
            fresh = account.begins(account.param.grad)
            (begin if fresh else go_on).append((account.in_place(), finished.finished))
            account.replayed(passed, finished.kind, fresh)
        for pairs, work in ((begin, torch._foreach_copy_), (go_on, torch._foreach_add_)):
            if pairs:
                work([out for out, _ in pairs], [moment for _, moment in pairs])

    def report(self, call: LayerCall) -> None:
        """What the replay that follows will have written by the time the gradients arrive."""
        for name, finished in self.moments.items():
            if name not in self.doubts:
                self.recorder.accounts[name].report(call, finished)
        for name, reason in self.doubts.items():
            self.recorder.accounts[name].doubt(reason)
