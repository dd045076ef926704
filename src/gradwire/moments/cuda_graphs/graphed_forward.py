"""Step 1, moments: a model's forward and backward as two CUDA graphs, so that Python's time for each layer is gone.

torch.cuda.make_graphed_callables makes them. While it captures the backward, the moments are written to memory that
every replay writes to again, and from there the accounts take them when the gradients arrive, as in any other backward.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradwire.compile.capture_guard import calm
from gradwire.errors import AttachError, GradwireError
from gradwire.moments.cuda_graphs.captured_moments import CapturedMoments
from gradwire.moments.layer_call import LayerCall
from gradwire.moments.layers.broadcast import WATCHED
from gradwire.moments.passes import Pass, arrives
from gradwire.moments.recorder import Recorder

ATTRIBUTE = "_gradwire_graph"
OVERWRITTEN = (
    "this forward pass ran as a CUDA graph, and a later one has written over what its backward needs: call backward "
    "before the next forward, or train without wire.capture"
)


class Ahead(torch.autograd.Function):
    """The identity behind a graph: its backward runs before the graph's and says what that will bring."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedForward, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphed, ctx.number, ctx.passed = graphed, graphed.number, graphed.recorder.passes.now()
        ctx.set_materialize_grads(True)
        return tuple(output.clone() for output in outputs)  # the next replay writes over the graph's own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.number != ctx.graphed.number:
            raise GradwireError(OVERWRITTEN)
        ctx.graphed.announce(ctx.passed)
        return None, *gradients


class GraphedForward:
    """A module's forward: by graphs for inputs like the sample, as before for all others.

    make: torch's, or a stand-in that runs on a CPU.
    """

    def __init__(
        self,
        recorder: Recorder,
        module: nn.Module,
        sample: Sequence[Tensor],
        make: Callable[..., Any] = torch.cuda.make_graphed_callables,
    ) -> None:
        refuse(recorder, module, sample)
        self.recorder, self._module, self.number = recorder, weakref.ref(module), 0
        self._given = list(module.parameters())
        self.parameters = [param for param in self._given if param.requires_grad]
        self.before = module.__dict__.get("forward")
        self.own = module.forward
        self.like = kind_of(sample)
        self._static: set[int] = set()  # addresses of the gradients that a replay writes
        self._capture(module, sample, make)
        names = {id(account.param): name for name, account in recorder.accounts.items()}
        self.names = [names.get(id(param), "") for param in self._given]
        self._complete, self._alone = self.capturing.complete(), False
        setattr(module, ATTRIBUTE, self)
        module.forward = types.MethodType(forward, module)
        recorder.graphs.append(self)

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (bool, ())  # as dead as None, and loads where gradwire is not installed

    def _made(self, module: nn.Module, sample: Sequence[Tensor], make: Callable[..., Any]) -> Any:
        """By the module's forward alone, since torch graphs none that has hooks.

        No reference to this object, which keeps the graphs alive.
        """
        own, count = self.own, len(sample)
        with stand_ins(module, self.recorder) as parameters:
            return make(lambda *given: own(*given[:count]), (*sample, *parameters), allow_unused_input=True)

    def _capture(self, module: nn.Module, sample: Sequence[Tensor], make: Callable[..., Any]) -> None:
        recorder, own = self.recorder, self.own
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        recorder.on_forward(module, tuple(sample), {})
        recorder.passes.capturing = self.capturing = CapturedMoments(recorder)
        # told of a capture, where the accumulators of the gradients have a part in nothing
        quiet: Any = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda _: None)
        quiet(False)
        try:
            with calm():
                self.capturing.survey(own, sample)
                self.graph = self._made(module, sample, make)
        finally:
            quiet(True)
            recorder.passes.capturing = None
            recorder.passes.begin_step(recorder.passes.step)
            with torch.no_grad():
                for buffer, value in buffers:  # a batch norm has counted what was no step
                    buffer.copy_(value)

    def fits(self, args: Sequence[Any]) -> bool:
        module = self._module()
        trains = module is not None and module.training and torch.is_grad_enabled()
        return trains and self.recorder.passes.capturing is None and kind_of(args) == self.like

    def run(self, args: Sequence[Tensor]) -> Any:
        """One forward pass by the graph."""
        self.number += 1
        self._keep_gradients()
        outputs, spec = pytree.tree_flatten(self.graph(*args, *self._given))
        differentiable = [one for one in outputs if one.requires_grad]
        if self._complete and differentiable and self.recorder.passes.alone:
            self.recorder.ignore()  # its graph does without hooks on parameters
        if differentiable and (self._complete or not self._static):
            self._after_replay(differentiable[0].grad_fn)
        made = iter(Ahead.apply(self, *differentiable))  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten([next(made) if one.requires_grad else one.clone() for one in outputs], spec)

    def announce(self, passed: Pass) -> None:
        """A replay of the backward follows: its moments are reported, where no hook of its own commits them."""
        self.recorder.passes.enter_task()
        self._alone = self._complete and not self.recorder.listening
        if not self._alone:
            self.capturing.report(LayerCall(passed.number, passed.batch, None, True, frozenset()))

    def _after_replay(self, node: Any) -> None:
        """One hook behind the replay in place of one on every parameter: those took as long as a small model's step.

        In the first replay it sees where the gradients lie that all hand over: AccumulateGrad takes them as they are.
        """
        passed, accumulators = self.recorder.passes.now().number, node.next_functions[-len(self.names) :]

        def after(made: Any, given: Any) -> None:
            self._static = self._static or {one.data_ptr() for one in made if one is not None}
            if not self._alone:  # a pass without a graph has come since
                return
            landing = zip(self.names, accumulators, strict=True)
            self.capturing.commit(
                passed, [name for name, (target, _) in landing if name and arrives(target, by_name=False)]
            )

        node.register_hook(after)

    def _keep_gradients(self) -> None:
        """A `.grad` that the last replay handed over and nobody took: already this forward writes over it."""
        for param in self.parameters:
            held = param.grad
            if held is not None and held.data_ptr() in self._static:
                param.grad = held.clone()

    def release(self) -> None:
        """The module's forward as it was."""
        module = self._module()
        if module is None or module.__dict__.get(ATTRIBUTE) is not self:
            return
        delattr(module, ATTRIBUTE)
        self.recorder.listen()
        if self.before is None:
            del module.__dict__["forward"]
        else:
            module.forward = self.before


@contextmanager
def stand_ins(module: nn.Module, recorder: Recorder | None) -> Iterator[list[nn.Parameter]]:
    """Other parameters with the parameters' memory in their places, in the order of `module.parameters()`.

    DDP keeps the accumulators of the parameters themselves, which belong to the stream it was made on; a backward that
    is captured may wait for no other stream than its own. Replays are given the parameters again.
    """
    others = {id(param): nn.Parameter(param.detach(), param.requires_grad) for param in module.parameters()}
    tables = [one._parameters for one in module.modules()]
    held = [(table, name, param) for table in tables for name, param in table.items() if param is not None]
    recorded = {} if recorder is None else recorder.accounts
    accounts = [account for account in recorded.values() if id(account.param) in others]
    try:
        for table, name, param in held:
            table[name] = others[id(param)]
        for account in accounts:
            account.here = others[id(account.param)]
            WATCHED[id(account.here)] = WATCHED[id(account.param)]
        yield list(others.values())
    finally:
        for table, name, param in held:
            table[name] = param
        for account in accounts:
            if account.here is not account.param:
                WATCHED.pop(id(account.here), None)
                account.here = account.param


# Named so for copies and pickles of a module, as in tap.py.
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module with a graph."""
    graphed: GraphedForward | None = getattr(self, ATTRIBUTE, None)
    if not graphed:
        return type(self).forward(self, *args, **kwargs)
    if kwargs or not graphed.fits(args):
        if torch.is_grad_enabled():
            graphed.recorder.listen()
        return graphed.own(*args, **kwargs)
    return graphed.run(args)


def kind_of(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a graph was made for; None where it is no tensor."""
    if not all(type(one) is Tensor for one in args):
        return None
    about = [(one.shape, one.stride(), one.dtype, one.device, one.requires_grad) for one in args]
    device = args[0].device.type if args else "cpu"
    lowered = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (*about, lowered)


def refuse(recorder: Recorder, module: nn.Module, sample: Sequence[Tensor]) -> None:
    """Says why a graph cannot be captured."""
    if not sample or kind_of(sample) is None:
        raise AttachError("capture wants the tensors that the model is called on, by position: wire.capture(x)")
    if not module.training or not torch.is_grad_enabled():
        raise AttachError("capture wants a model that trains: model.train(), and not under torch.no_grad()")
    if getattr(module, ATTRIBUTE, None):
        raise AttachError("this model is captured already; wire.release() gives its own forward back")
    if recorder.options.estimator == "signs":
        raise AttachError('estimator="signs" draws anew in every pass and cannot be captured; attach with "groups"')
