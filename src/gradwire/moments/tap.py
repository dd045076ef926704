"""Step 1, moments: the tap on a layer's output: it hands (input, gradient) to the ledgers and changes nothing."""

from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradwire.moments.check import widest
from gradwire.moments.combined import settled
from gradwire.moments.ledger import Ledger
from gradwire.moments.registry import Layer
from gradwire.moments.site import Doubt, Mismatch, Pass, Site, quietly
from gradwire.moments.staged import current_task
from gradwire.moments.uses import Landed, Use, norm

if TYPE_CHECKING:
    from gradwire.moments.recorder import Recorder

ATTRIBUTE = "_gradwire_tap"
TELLS_EXPORT = torch.__version__ >= "2.12"  # before, is_exporting() is true in every compiled graph
TAPS: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()
_keys = itertools.count(1)
NOTHING: Mapping[str, torch.dtype] = types.MappingProxyType({})


class Tap:
    """What hangs on a module whose forward was swapped. A copy of it is dead: it records nothing."""

    live = False

    def __init__(
        self,
        module: nn.Module | None,
        layer: Layer | None,
        axis: int | None,
        ledgers: Mapping[str, Ledger],
        recorder: Recorder,
        name: str,
        named: bool = False,
    ) -> None:
        self.module, self.layer, self.axis, self.name, self.named = module, layer, axis, name, named
        self.ledgers, self.recorder = dict(ledgers), recorder
        self.signed: dict[str, Ledger] = {}  # parameters estimated from this module's outputs, by random signs
        self.after: Callable[[nn.Module, Tap, Any], Any] | None = None
        self.fitting: dict[tuple[Any, ...], bool] = {}  # of what kinds of input its Function may stand in
        self.positions = False  # an Embedding of which the caller says that it is given positions
        self.mismatch: str | None = None  # its sample axis was once not B long: then it never is but by chance
        self.input = None if module is None else first_input(module)
        self.key = next(_keys)
        self.live = True
        TAPS[self.key] = self

    def __deepcopy__(self, memo: object) -> Tap:
        return Tap.__new__(Tap)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled model must load where gradwire is not installed; False is as dead as a dead tap.
        return (bool, ())

    def wanted(self) -> frozenset[str]:
        """The parameters that want a gradient now: freezing may come and go between calls."""
        return frozenset([name for name, ledger in self.ledgers.items() if ledger.param.requires_grad])

    def site(self, part: str, output: Tensor, now: Pass, wanted: frozenset[str]) -> Site:
        """A call that puts this out; its input does as well, where the samples lie along the same axis of that."""
        training = self.module is not None and self.module.training
        recomputed = current_task() != -1
        site = Site(now.number, now.batch, self.axis, training, wanted, False, now.doubt, recomputed)
        self.locate(site, part, output)
        return site

    def locate(self, site: Site, part: str, output: Tensor) -> None:
        """Tells a call where its samples lie: as the caller named it, as it was followed, or else where they fit."""
        found = None if self.named else self.recorder.batch_axis.find(self.name, part, output.ndim, self.embeds)
        own = None if self.layer is None else self.layer.own_axis
        if found is None:
            site.doubt = site.doubt or self.mismatch
            if not self.named and own is None:
                site.doubt = site.doubt or self.recorder.batch_axis.chance(output, site.samples)
            return
        site.doubt = site.doubt or found.doubt
        if found.doubt is None and own is not None and found.axis != own:
            site.doubt = site.doubt or f"its samples lie along axis {found.axis}, and it computes along axis {own}"
        site.axis = found.axis
        if found.axis is not None and site.samples is not None:
            rows = found.rows(output.shape[found.axis], site.samples)
            if rows is None:
                site.doubt = site.doubt or f"axis {found.axis} is {output.shape[found.axis]} long, not {site.samples}"
            else:
                site.outer, site.inner = rows

    @property
    def embeds(self) -> bool:
        return isinstance(self.module, nn.Embedding)

    def stage(
        self,
        part: str,
        gradient: Tensor,
        saved: tuple[Tensor, ...],
        site: Site,
        asked: Mapping[str, torch.dtype] = NOTHING,
    ) -> dict[str, Tensor]:
        """Turns (input, gradient) into uses, stages them with the parameters' ledgers, and makes the asked gradients.

        asked: the dtype of each; one that is missing in the answer is the caller's to make.
        """
        made: dict[str, Tensor] = {}
        if not self.live or self.recorder.paused:
            return made
        assert self.layer is not None
        self.recorder.enter_task()
        if torch.is_grad_enabled():
            for name in site.wanted:
                self.ledgers[name].check.ask()
        with quietly(gradient.device):
            try:
                uses = list(self.layer.formulas[part](self.module, gradient, saved, site))
                eps = widest([gradient.dtype, *[tensor.dtype for tensor in saved]])
                for name, use in uses:
                    if name in site.wanted:
                        if site.samples is not None and site.folds:
                            use = use.folded(site.outer, site.samples, site.inner)
                        use.eps, use.output_gradients = eps, (gradient,)
                        if name in asked:
                            use.place = self.ledgers[name].place()
                            made[name] = use.gradient(asked[name])
                            use.landed = Landed(made[name])
                        self.ledgers[name].stage(
                            site, self._settled(name, use, made.get(name)) if site.compiled else use
                        )
            except Doubt as doubt:
                if isinstance(doubt, Mismatch) and not self.recorder.batch_axis.followed:
                    self.mismatch = str(doubt)
                for name in site.wanted:
                    self.ledgers[name].doubt(str(doubt))
        return made

    def keeps(self) -> bool:
        """Whether a compiled graph must clone what it hands over: uses that may have to be merged."""
        return any(self.ledgers[name].shared or not self.ledgers[name].check.verified for name in self.wanted())

    def _settled(self, name: str, use: Use, made: Tensor | None) -> Use:
        """Finished at once. What a check reads is made where one is coming, from the made gradient where there is one:
        as where a gradient landed, it is asked whether anything else came along, not whether it was made well.
        """
        if self.keeps():
            return use
        ledger = self.ledgers[name]
        finished = settled(use, ledger.param, ledger.dtype)
        finished.landed = use.landed
        if ledger.check.coming:
            if made is not None and made.ndim > 1:
                use.summed = made.to(ledger.dtype)
            finished.probed = use.along(ledger.check.probe)
            finished.output_gradients = tuple(norm(gradient) for gradient in use.output_gradients)
        return finished


def first_input(module: nn.Module) -> str:
    """The name of the first argument of a module's forward, by which it may be called."""
    return next(itertools.islice(inspect.signature(type(module).forward).parameters, 1, None), "")


class Watch(torch.autograd.Function):
    """The identity; its backward stages a use. Weight gradients stay torch's own, bit for bit."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tap: Tap, part: str, site: Site, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)  # and not on ctx: both kinds of checkpoint free only what is saved so
        ctx.set_materialize_grads(False)
        ctx.tap, ctx.part, ctx.site, ctx.count = tap, part, site, len(saved)
        # .data and not a view: an in-place ReLU may follow. No layer here saves its own output.
        return output.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is not None:
            # read once: a checkpoint gives each saved tensor back only once
            ctx.tap.stage(ctx.part, gradient.detach(), ctx.saved_tensors, ctx.site)
        return (gradient, None, None, None, *[None] * ctx.count)


def watch(tap: Tap, output: Tensor, saved: Sequence[Tensor], part: str = "") -> Tensor:
    """Passes a layer's output on, and has its gradient staged together with the saved inputs."""
    if torch.compiler.is_compiling():
        training = tap.module is not None and tap.module.training
        watched: Tensor = torch.ops.gradwire.tap(output, list(saved), tap.recorder.clock, tap.key, part, training)
        return watched
    if tap.recorder.following is not None:
        tap.recorder.following.note(tap, part, output)
        return output
    if not output.requires_grad:
        return output
    site = tap.site(part, output, tap.recorder.now(), tap.wanted())
    result: Tensor = Watch.apply(output, tap, part, site, *saved)  # type: ignore[no-untyped-call]
    return result


def autocast_input(x: Any) -> Any:
    """What autocast would make of a layer's input: saved once, not once as it is and once as the layer saves it."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def plain_forward(module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward of one input, and the tap on its output."""
    named = dict(kwargs)
    if not args and tap.input not in named:
        return type(module).forward(module, **named)  # which says what is missing
    x = args[0] if args else named.pop(tap.input or "")
    if tap.layer is not None and tap.layer.casts:
        x = autocast_input(x)
    output = type(module).forward(module, x, *args[1:], **named)
    # A bias needs no input: with frozen weights nothing is kept alive for it.
    return watch(tap, output, (x,) if tap.wanted() - {"bias"} else ())


def transformed() -> bool:
    """Inside torch.func, a tracer or an exporter: there is no backward of ours to see."""
    if torch.compiler.is_compiling():
        return TELLS_EXPORT and torch.compiler.is_exporting()
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()


# The name matters: a bound method is copied and pickled by the name of its function, so that a deep copy (an EMA
# model) gets this forward bound to itself, and an unpickled model gets its class's own.
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a watched module: its own, with the output tapped while someone listens."""
    tap: Tap = getattr(self, ATTRIBUTE)
    if not tap or not tap.live:
        return type(self).forward(self, *args, **kwargs)
    following = tap.recorder.following is not None
    if not following and (not torch.is_grad_enabled() or transformed()):
        return type(self).forward(self, *args, **kwargs)
    # torch.func.functional_call puts other tensors in the parameters' places: not ours to record.
    own = all(held(self, name) is ledger.here for name, ledger in tap.ledgers.items())
    if (own or following) and tap.layer is not None and (following or tap.wanted()):
        result = (tap.layer.forward or plain_forward)(self, tap, *args, **kwargs)
    else:
        result = type(self).forward(self, *args, **kwargs)
    if tap.after is not None and not torch.compiler.is_compiling():
        return tap.after(self, tap, result)
    return result


def held(module: nn.Module, name: str) -> Any:
    """The parameter of that name, which may be dotted: that of a module within."""
    return module.get_parameter(name) if "." in name else module._parameters.get(name)


def is_free(module: nn.Module) -> bool:
    """Whether forward can be swapped: it is the class's own, or a dead copy's of ours."""
    mine = module.__dict__.get("forward")
    if mine is None:
        return True
    function = getattr(mine, "__func__", None)
    tap = module.__dict__.get(ATTRIBUTE)
    return function is type(module).forward or (function is forward and not (tap and tap.live))


def install(module: nn.Module, tap: Tap) -> None:
    setattr(module, ATTRIBUTE, tap)
    module.forward = types.MethodType(forward, module)


def uninstall(module: nn.Module, tap: Tap) -> None:
    """Restores the class's forward, unless someone swapped it again over ours."""
    tap.live = False
    ours = getattr(module.__dict__.get("forward"), "__func__", None) is forward
    if ours and module.__dict__.get(ATTRIBUTE) is tap:
        delattr(module, ATTRIBUTE)
        del module.__dict__["forward"]
