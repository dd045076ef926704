"""Step 1, moments: one parameter's account: uses are staged in backward, and committed when its gradient arrives."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradwire.errors import MomentError
from gradwire.layout import in_shape
from gradwire.moments.book import Book
from gradwire.moments.check import THRICE, Check
from gradwire.moments.combined import by_samples, merge
from gradwire.moments.estimators import MicroBatches, step
from gradwire.moments.site import Doubt, Site, quietly
from gradwire.moments.staged import Passes, Stage, current_task
from gradwire.moments.together import exact_dtype
from gradwire.moments.uses import Use

INTERACT = "samples interact in a batch norm"
UNEQUAL = "one backward through passes of {} samples: they count as different ones"
REENTRANT = (
    "a reentrant checkpoint brings its uses in one pass apart, without cross terms; use_reentrant=False does not"
)


class Ledger:
    """The moment of one parameter: stage, commit, consume."""

    def __init__(self, name: str, param: nn.Parameter, book: Book, never: str | None, raw: str | None) -> None:
        self.name, self.param, self.book = name, param, book
        self.here: Tensor = param  # what stands in its place: another tensor while a graph is captured
        self.never = never  # why it can never be exact
        self.shared = False  # used more than once in a pass
        self.hint = raw or "none of its uses is in a layer known here; gradwire.per_sample(param, x) makes it exact"
        self.estimated = never is not None or raw is not None  # keeps account of micro-batches
        self.dtype = exact_dtype(param)
        self.check = Check(param, self.dtype)
        self.moment = torch.zeros(param.numel(), dtype=self.dtype, device=param.device)
        self._view: Tensor | None = None
        self.staged: dict[int, Stage] = {}
        self.consumed, self.arrived = True, False
        self.commits = 0
        self.empty = False  # what the moment holds is of the accumulation before, and is written over
        self.committed: dict[int, bool] = {}  # passes in this accumulation -> whether a part was recomputed
        self.overlap = False  # two commits of one pass: they are no groups
        self.last_pass = 0
        self.version = -1
        self.backwards = 0
        self.batches = MicroBatches(self.dtype)
        self.reason: str | None = None  # why this accumulation is estimated
        self.kind, self.why = "not seen yet", "no gradient so far"

    # ---- staging, from taps in backward

    def stage(self, site: Site, use: Use, signed: bool = False) -> None:
        if self.book.capturing is not None:
            self.book.capturing.take(self, site.passed, use)
            return
        stage = self._stage()
        (stage.signed if signed else stage.uses).setdefault(site.passed, []).append(use)
        if site.recomputed:
            stage.recomputed.add(site.passed)

    def doubt(self, reason: str) -> None:
        if self.book.capturing is not None:
            self.book.capturing.doubts[self.name] = reason
            return
        self._stage().doubt = reason

    def _stage(self) -> Stage:
        task = current_task()
        found = self.staged.get(task)
        if found is None:
            held = self.param.grad
            found = self.staged[task] = Stage(self.commits, self.begins(held))
            if self.never is None:
                self.check.before(held)
        return found

    def place(self) -> Tensor | None:
        """Where the first use of a backward may write its moment before it counts: nobody needs what is there.

        Kernels store 16 bytes at once, and in a bucket a tensor may begin anywhere.
        """
        if self.shared or self.book.capturing is not None or self.moment.data_ptr() % 16:
            return None
        stage = self._stage()
        if stage.placed or stage.uses or not stage.fresh or self.moment.dtype != self.dtype or len(self.staged) > 1:
            return None
        stage.placed = True
        return self.in_place()

    def _make_room(self) -> None:
        """A backward inside another one (a reentrant checkpoint) commits first: the other's moment moves elsewhere."""
        for stage in self.staged.values():
            stage.move_out()

    # ---- the parameter's hooks

    def on_gradient(self, gradient: Tensor) -> None:
        """Before accumulation, where an estimate may be asked for: a micro-batch's own share."""
        if self.book.paused or self.book.capturing is not None:
            return
        stage = self._stage()
        stage.commits, stage.fresh = self.commits, self.begins(self.param.grad)
        # A reference to a first gradient would make AccumulateGrad copy instead of taking it.
        self.batches.share = None if stage.fresh else gradient.detach()

    def begins(self, held: Tensor | None) -> bool:
        """Whether what comes now is the first of an accumulation; held: `.grad`, before it."""
        return self.consumed or held is None or self._cleared(held)

    def _cleared(self, held: Tensor) -> bool:
        """zero_grad(set_to_none=False): someone wrote to .grad since, and left nothing in it."""
        return held._version != self.version and not bool(held.any())

    def on_accumulated(self, param: Tensor) -> None:
        """After accumulation and before DDP's own hook: the moment counts now, since the gradient does.

        Under autograd.grad(loss, [param]) the tensor hook fires too, this one does not.
        """
        gradient, book = param.grad, self.book
        if book.paused or gradient is None:  # an optimizer inside backward has taken the gradient already
            return
        stage = self.staged.pop(current_task(), None) or Stage()
        # Another backward inside this one may have committed since it began, or nothing was staged.
        fresh = stage.fresh if stage.commits == self.commits else self.consumed or gradient._version <= self.version
        if self.staged:
            self._make_room()
        if fresh:
            self._restart()
        book.ran_backward = True
        self.backwards += 1
        self.commits += 1
        # create_graph leaves gradients on, and a backward inside autocast would square in bfloat16
        with quietly(param.device):
            reason = self._commit(stage, gradient)
            if reason is not None or self.estimated:
                self.batches.count(gradient, book.open_samples, self.backwards)
            if self.empty:
                self._clear()
        self.version = gradient._version
        self.arrived, self.consumed, self.last_pass = True, False, book.passes
        if reason is not None:
            self._doubted(reason)

    def replayed(self, passed: int, kind: str, fresh: bool) -> None:
        """A captured graph has written or added its moment, and its gradient will be accumulated."""
        if fresh:
            self._restart()
            self.empty = False
        self.backwards += 1
        self.committed[passed] = False
        self.version = -1  # its gradient is not there yet; who wants to know looks at the values
        self.arrived, self.consumed, self.last_pass = True, False, self.book.passes
        self.kind, self.why = kind, INTERACT if kind != "exact" else ""

    def _restart(self) -> None:
        self.empty = True
        self.backwards, self.batches.groups, self.reason = 0, None, None
        self.overlap = False
        self.committed.clear()

    def _clear(self) -> None:
        self.moment.zero_()
        self.empty = False

    def _commit(self, stage: Stage, gradient: Tensor) -> str | None:
        """Adds what was staged to the moment; the reason when there is nothing exact to add."""
        overlapping = self._overlapping(stage)
        reason = None if stage.uses else self.hint
        if self.never or stage.doubt or overlapping:
            reason = "; ".join(why for why in (self.never, stage.doubt, overlapping) if why)
        if reason is None:
            try:
                self._add(stage.uses, gradient)
                return None
            except Doubt as doubt:
                reason = str(doubt)
        if stage.signed and self.book.estimator == "signs":
            self._finish(merge(uses) for uses in by_samples(stage.signed, self.book.same_samples))
            self.kind, self.why = "signs", reason
            return None
        return reason

    def _overlapping(self, stage: Stage) -> str | None:
        """A reentrant checkpoint runs a backward of its own: what it and others commit of one pass is not merged."""
        for passed in stage.uses.keys() | stage.signed.keys() if stage.signed else stage.uses:
            recomputed = passed in stage.recomputed
            if passed in self.committed and (recomputed or self.committed[passed]):
                self.overlap = True
            self.committed[passed] = recomputed or self.committed.get(passed, False)
        return REENTRANT if self.overlap else None

    def _add(self, passes: Passes, gradient: Tensor) -> None:
        merged = []
        eps = 0.0
        for uses in by_samples(passes, self.book.same_samples):
            self.shared = self.shared or len(uses) > 1
            eps = max(eps, *[use.eps for use in uses])
            merged.append(merge(uses))
        self._finish(merged)
        try:
            self.check.after(merged, gradient, eps, self.moment)
        except Doubt as doubt:
            if self.check.mismatches >= THRICE:
                self.never = str(doubt)
            raise
        if self.check.verified:
            self.estimated = False
        if self.reason is None:
            self.kind = next((use.kind for use in merged if use.kind != "exact"), "exact")
            sizes = sorted({use.samples for use in merged})
            apart = UNEQUAL.format(" and of ".join(map(str, sizes))) if len(sizes) > 1 else ""
            self.why = INTERACT if self.kind != "exact" else apart

    def _finish(self, uses: Iterable[Use]) -> None:
        out = self.in_place()
        if out.dtype != self.dtype:
            out = torch.zeros_like(self.param, dtype=self.dtype)
        for use in uses:
            if self.empty and out.dtype == self.moment.dtype:
                use.write(out)
                self.empty = False
            else:
                use.accumulate(out)
        if out.dtype != self.moment.dtype:
            if self.empty:
                self._clear()
            self.in_place().add_(out)

    def in_place(self) -> Tensor:
        """The moment in the parameter's shape and memory order, which may change: to(memory_format=channels_last)."""
        if self._view is None or self._view.stride() != self.param.stride() or self._view.shape != self.param.shape:
            self._view = in_shape(self.moment, self.param)
        return self._view

    def _doubted(self, reason: str) -> None:
        self.reason, self.estimated = reason, True
        self.book.hear(self)
        self.kind, self.why = self._estimate_kind(), reason
        if self.book.strict:
            raise MomentError(
                f"strict=True wants exact moments, but that of {self.name!r} (shape {tuple(self.param.shape)}) "
                f"would be estimated: {reason}. Name its sample axis with batch_dim={{module: dim}}, "
                "use gradwire.per_sample, or attach with strict=False"
            )

    # ---- estimates

    def _estimate_kind(self) -> str:
        several = self.batches.several and not self.overlap
        grouped = self.book.estimator == "groups" and several
        return "groups" if grouped else "step"

    def seen(self) -> bool:
        """Whether a gradient arrived since the last consume, and was not zeroed or dropped before a later pass."""
        if self.arrived and self.book.passes != self.last_pass:
            held = self.param.grad
            if held is None or self._cleared(held):
                self.arrived = False
                self.moment.zero_()
        return self.arrived

    def consume(self, gradient: Tensor) -> None:
        """Completes an estimated moment from the accumulated gradient; the next commit overwrites."""
        if self.arrived and self.reason is not None:
            self._estimate(in_shape(gradient, self.param), self.reason)
        self.batches.groups = None
        self.consumed, self.arrived = True, False

    @torch.no_grad()
    def _estimate(self, gradient: Tensor, reason: str) -> None:
        self.kind, self.why = self._estimate_kind(), reason
        if self.kind == "groups" and self.batches.groups is not None:
            moment = self.batches.groups.moment(gradient)
        else:
            moment = step(gradient, self.dtype)
            if self.book.estimator == "groups":
                self.why += "; one micro-batch, and groups needs two"
        in_shape(self.moment, self.param).copy_(moment)

    def bind(self, destination: Tensor) -> None:
        """From now on the moment lives in a float32 buffer of someone else's."""
        count = self.param.numel()
        if destination.shape != (count,) or destination.dtype != torch.float32:
            raise ValueError(
                f"the moment of {self.name!r} needs a float32 buffer of shape ({count},), but got "
                f"{destination.dtype} of shape {tuple(destination.shape)}"
            )
        destination.copy_(self.moment)
        self.moment, self._view = destination, None
