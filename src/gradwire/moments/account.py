"""Step 1, moments: one parameter's account: a backward reports uses, and with the gradient they become the moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradwire.errors import MomentError
from gradwire.layout import in_shape
from gradwire.moments.completeness import Completeness
from gradwire.moments.coverage import Row
from gradwire.moments.joined_uses import Settled, by_samples, merge
from gradwire.moments.micro_batches import MicroBatches
from gradwire.moments.passes import ModelPasses, current_task, quietly
from gradwire.moments.precision import exact_dtype, norm
from gradwire.moments.uses import Doubt, Use

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from gradwire.moments.layer_call import LayerCall

INTERACT = "samples interact in a batch norm"
UNEQUAL = "one backward through passes of {} samples: they count as different ones"
REENTRANT = (
    "a reentrant checkpoint brings its uses in one pass apart, without cross terms; use_reentrant=False does not"
)
OFTEN = 64  # on a GPU uses are compared every so many commits, since the answer must be waited for; on a CPU always
THRICE = 3  # mismatches until the parameter is no longer believed at all
ByPass = dict[int, list[Use]]


class Options(NamedTuple):
    """What the user chose for all parameters; estimator: for those without an exact moment."""

    estimator: str
    strict: bool


def returned(gradient: Tensor) -> Callable[[Tensor], bool]:
    """Whether what is in `.grad` is the very gradient that a layer's backward returned, and nobody wrote to it since.

    Then nothing is left to compare: on a CPU, where every commit is compared, that takes as long as a small layer.
    Sound where it says yes, but for a write through `.data`: the storage is held weakly, so its address is not used
    again. A reference to the gradient itself would make AccumulateGrad copy it.
    """
    storage: Any = StorageWeakRef(gradient.untyped_storage())  # type: ignore[no-untyped-call]
    version = gradient._version

    def is_in(held: Tensor) -> bool:
        same = held.layout == torch.strided and held._version == version
        return same and bool(held.untyped_storage()._cdata == storage.cdata)

    return is_in


@dataclass
class Reported:
    """What one backward (graph task) has reported so far, by forward pass.

    commits: how many had been made when it began; fresh: whether `.grad` was empty then.
    """

    commits: int = -1
    fresh: bool = False
    placed: bool = False  # a use may have written its moment already
    uses: ByPass = field(default_factory=dict)
    signed: ByPass = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)  # passes of which a reentrant checkpoint recomputed a part
    doubt: str | None = None

    def move_out(self) -> None:
        """What was written where the moment belongs goes elsewhere: another backward commits first."""
        for use in (use for uses in self.uses.values() for use in uses if use.place is not None):
            use.finished = None if use.finished is None else use.finished.clone()


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A parameter's hook that keeps nothing alive: Python cannot collect cycles through autograd's hooks."""
    reference = weakref.WeakMethod(method)

    def call(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(tensor)

    return call


class Account:
    """The moment of one parameter: report, on_accumulated, consume."""

    def __init__(
        self, name: str, param: nn.Parameter, passes: ModelPasses, options: Options, never: str | None, hint: str
    ) -> None:
        self.name, self.param, self.passes, self.options = name, param, passes, options
        self.here: Tensor = param  # what stands in its place: another tensor while a graph is captured
        self.never = never  # why it can never be exact
        self.shared = False  # used more than once in a pass
        self.hint = hint  # why it is estimated where nothing is reported
        self.estimated = False  # keeps account of micro-batches
        self.dtype = exact_dtype(param)
        self.completeness = Completeness(param, self.dtype)
        self.verified = False  # its uses added up to its gradient the last time
        self.mismatches, self._compared_commits, self._due = 0, 0, False
        self.moment = torch.zeros(param.numel(), dtype=self.dtype, device=param.device)
        self._view: Tensor | None = None
        self.reported: dict[int, Reported] = {}  # by graph task
        passes.reports.append(self.reported)
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
        self._handles: list[RemovableHandle] = []

    # ---- uses, reported in backward

    def report(
        self, call: LayerCall, use: Use, dtype: torch.dtype | None = None, signed: bool = False
    ) -> Tensor | None:
        """A layer's backward reports a use; its gradient in `dtype`, where the layer wants to return that."""
        made = None
        if dtype is not None:
            use.place = self._place()
            made = use.gradient(dtype)
            use.is_returned = returned(made)
        if call.at_once:
            use = self.settled(use, self._compares_next, made)
        capturing = self.passes.capturing
        if capturing is not None:
            capturing.take(self, call.passed, use)
            return made
        reported = self._reported()
        (reported.signed if signed else reported.uses).setdefault(call.passed, []).append(use)
        if call.recomputed:
            reported.recomputed.add(call.passed)
        return made

    def doubt(self, reason: str) -> None:
        if self.passes.capturing is not None:
            self.passes.capturing.doubts[self.name] = reason
            return
        self._reported().doubt = reason

    def _reported(self) -> Reported:
        task = current_task()
        found = self.reported.get(task)
        if found is None:
            held = self.param.grad
            found = self.reported[task] = Reported(self.commits, self.begins(held))
            if self.never is None:
                self._due, self.completeness.before = self._compares_next, None
                if self._due and held is not None:
                    self.completeness.remember(held)
        return found

    def _place(self) -> Tensor | None:
        """Where the first use of a backward may write its moment before it counts: nobody needs what is there.

        Kernels store 16 bytes at once, and in a bucket a tensor may begin anywhere.
        """
        if self.shared or self.passes.capturing is not None or self.moment.data_ptr() % 16:
            return None
        reported = self._reported()
        taken = reported.placed or reported.uses or not reported.fresh
        if taken or self.moment.dtype != self.dtype or len(self.reported) > 1:
            return None
        reported.placed = True
        return self.in_place()

    def settled(self, use: Use, compares: bool, made: Tensor | None = None) -> Settled:
        """Finished at once. What a comparison reads is made where one is coming, from the made gradient where there is
        one: it is asked whether anything else came along, not whether it was made well.
        """
        finished = Settled(use, self.param, self.dtype)
        if compares:
            if made is not None and made.ndim > 1:
                use.summed = made.to(self.dtype)
            finished.probed = use.along(self.completeness.probe)
            finished.output_gradients = tuple(norm(gradient) for gradient in use.output_gradients)
        return finished

    # ---- the parameter's hooks

    def listen(self) -> None:
        """Hears of every gradient."""
        param: Any = self.param  # torch's hook methods carry no types
        wants = param.requires_grad
        param.requires_grad_(True)  # a hook on a frozen parameter is refused, though it may be thawed later
        self._handles.append(param.register_post_accumulate_grad_hook(weakly(self.on_accumulated)))
        if self.estimated:
            self._listen_before()
        param.requires_grad_(wants)

    def _listen_before(self) -> None:
        """Also before the gradient is accumulated, for estimates."""
        if len(self._handles) == 1:
            self._handles.append(self.param.register_hook(weakly(self.on_gradient)))  # type: ignore[no-untyped-call]

    def ignore(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def on_gradient(self, gradient: Tensor) -> None:
        """Before accumulation, where an estimate may be asked for: a micro-batch's own share."""
        if self.passes.paused or self.passes.capturing is not None:
            return
        reported = self._reported()
        reported.commits, reported.fresh = self.commits, self.begins(self.param.grad)
        # A reference to a first gradient would make AccumulateGrad copy instead of taking it.
        self.batches.share = None if reported.fresh else gradient.detach()

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
        gradient, passes = param.grad, self.passes
        if passes.paused or gradient is None:  # an optimizer inside backward has taken the gradient already
            return
        reported = self.reported.pop(current_task(), None) or Reported()
        # Another backward inside this one may have committed since it began, or nothing was reported.
        known = reported.commits == self.commits
        fresh = reported.fresh if known else self.consumed or gradient._version <= self.version
        # A backward inside another one (a reentrant checkpoint) commits first: the other's moment moves elsewhere.
        for other in self.reported.values():
            other.move_out()
        if fresh:
            self._restart()
        passes.ran_backward = True
        self.backwards += 1
        self.commits += 1
        # create_graph leaves gradients on, and a backward inside autocast would square in bfloat16
        with quietly(param.device):
            reason = self._commit(reported, gradient)
            if reason is not None or self.estimated:
                self.batches.count(gradient, passes.open_samples, self.backwards)
            if self.empty:
                self._clear()
        self.version = gradient._version
        self.arrived, self.consumed, self.last_pass = True, False, passes.current.number
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
        self.arrived, self.consumed, self.last_pass = True, False, self.passes.current.number
        self.kind, self.why = kind, INTERACT if kind != "exact" else ""

    def _restart(self) -> None:
        self.empty = True
        self.backwards, self.batches.groups, self.reason = 0, None, None
        self.overlap = False
        self.committed.clear()

    def _clear(self) -> None:
        self.moment.zero_()
        self.empty = False

    # ---- uses become the moment

    def _commit(self, reported: Reported, gradient: Tensor) -> str | None:
        """Adds what was reported to the moment; the reason when there is nothing exact to add."""
        reasons = [self.never, reported.doubt, self._overlapping(reported)]
        reason = "; ".join(why for why in reasons if why) or (None if reported.uses else self.hint)
        if reason is None:
            try:
                self._add(reported.uses, gradient)
                return None
            except Doubt as doubt:
                reason = str(doubt)
        if reported.signed and self.options.estimator == "signs":
            self._finish(self._merged(reported.signed))
            self.kind, self.why = "signs", reason
            return None
        return reason

    def _overlapping(self, reported: Reported) -> str | None:
        """A reentrant checkpoint runs a backward of its own: what it and others commit of one pass is not merged."""
        for passed in reported.uses.keys() | reported.signed.keys() if reported.signed else reported.uses:
            recomputed = passed in reported.recomputed
            if passed in self.committed and (recomputed or self.committed[passed]):
                self.overlap = True
            self.committed[passed] = recomputed or self.committed.get(passed, False)
        return REENTRANT if self.overlap else None

    def _merged(self, passes: ByPass) -> list[Use]:
        """One use for all that are on the same samples."""
        together = list(passes.values()) if len(passes) == 1 else by_samples(passes, self.passes.same_samples)
        self.shared = self.shared or any(len(uses) > 1 for uses in together)
        return [uses[0] if len(uses) == 1 else merge(uses) for uses in together]

    def _add(self, passes: ByPass, gradient: Tensor) -> None:
        merged = self._merged(passes)
        self._finish(merged)
        self._verify(merged, gradient)
        if self.verified:
            self.estimated = False
        if self.reason is None:
            self.kind = next((use.kind for use in merged if use.kind != "exact"), "exact")
            sizes = sorted({use.samples for use in merged})
            apart = UNEQUAL.format(" and of ".join(map(str, sizes))) if len(sizes) > 1 else ""
            self.why = INTERACT if self.kind != "exact" else apart

    def _finish(self, uses: Sequence[Use]) -> None:
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

    # ---- do they add up to the gradient

    @property
    def _compares_next(self) -> bool:
        """Whether the next commit is compared."""
        seldom = self.verified and self.param.is_cuda and self._compared_commits % OFTEN
        return self.param.numel() > 0 and not seldom

    def _verify(self, merged: Sequence[Use], held: Tensor) -> None:
        """After accumulation: doubts where the uses do not add up to what came; merged: those on the same samples."""
        self._compared_commits += 1
        due, self._due = self._due, False
        if not due:
            return
        alone = len(merged) == 1 and self.completeness.before is None and self._compared_commits % OFTEN
        is_returned = merged[0].is_returned if alone else None
        if all(use.proven for use in merged) or (is_returned is not None and is_returned(held)):
            self.verified = True
            return
        try:
            self.compare(merged, held, self.moment)
        except Doubt as doubt:
            if self.mismatches >= THRICE:
                self.never = str(doubt)
            raise

    def compare(self, merged: Sequence[Use], held: Tensor, moment: Tensor) -> None:
        """Doubts where the uses do not add up to what came, and remembers whether they did."""
        try:
            equal = self.completeness.compare(merged, held, moment)
        except Doubt:
            self.verified = False
            self.mismatches += 1
            raise
        if equal is not None:
            self.verified = equal

    # ---- estimates

    def _doubted(self, reason: str) -> None:
        self.reason, self.estimated = reason, True
        self._listen_before()
        self.kind, self.why = self._estimate_kind(), reason
        if self.options.strict:
            raise MomentError(
                f"strict=True wants exact moments, but that of {self.name!r} (shape {tuple(self.param.shape)}) "
                f"would be estimated: {reason}. Name its sample axis with batch_dim={{module: dim}}, "
                "use gradwire.per_sample, or attach with strict=False"
            )

    def _estimate_kind(self) -> str:
        grouped = self.options.estimator == "groups" and self.batches.several and not self.overlap
        return "groups" if grouped else "step"

    @torch.no_grad()
    def _estimate(self, gradient: Tensor, reason: str) -> None:
        self.kind, self.why = self._estimate_kind(), reason
        if self.kind == "groups" and self.batches.groups is not None:
            moment = self.batches.groups.moment(gradient)
        else:
            moment = gradient.to(self.dtype).square()  # the whole batch as one sample
            if self.options.estimator == "groups":
                self.why += "; one micro-batch, and groups needs two"
        in_shape(self.moment, self.param).copy_(moment)

    # ---- what becomes of the moment

    def seen(self) -> bool:
        """Whether a gradient arrived since the last consume, and was not zeroed or dropped before a later pass."""
        if self.arrived and self.passes.current.number != self.last_pass:
            held = self.param.grad
            if held is None or self._cleared(held):
                self.arrived = False
                self.moment.zero_()
        return self.arrived

    def consume(self, gradient: Tensor) -> bool:
        """Completes an estimated moment from the accumulated gradient, to be overwritten next; whether one was seen."""
        seen = self.seen()
        if seen and self.reason is not None:
            self._estimate(in_shape(gradient, self.param), self.reason)
        self.batches.groups = None
        self.consumed, self.arrived = True, False
        return seen

    def row(self) -> Row:
        """For the report, as the last backward left it."""
        if not self.param.requires_grad:
            return Row(self.name, "frozen", "requires_grad is False")
        return Row(self.name, self.kind, self.never if self.kind == "not seen yet" and self.never else self.why)

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
