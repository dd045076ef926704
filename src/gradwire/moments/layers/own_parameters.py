"""Step 1, moments: parameters that a module uses by itself: a scale, a token, positions, a norm or a weight of its own.

While such a module's forward runs, a `StandIn` stands in each parameter's place and sees every torch function that is
given it. What the function does with the parameter, and where the samples lie in what comes out, was read off when the
batch axis was followed through the model (batch_axis.py); where it was not, nothing is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gradwire.moments.batch_axis import NOWHERE, Where
from gradwire.moments.layer_call import LayerCall, Tap, path_of
from gradwire.moments.layer_table import Layer, Uses
from gradwire.moments.layers.convolution import convolution
from gradwire.moments.layers.linear import linear, transposed_linear
from gradwire.moments.layers.normalization import by_feature
from gradwire.moments.precision import exact_dtype
from gradwire.moments.swapped_forward import watch
from gradwire.moments.uses import Direct, Use

ELEMENTWISE = {"add", "sub", "mul", "div", "true_divide", "add_", "sub_", "mul_", "div_"}
SPREADING = {"expand", "expand_as", "repeat", "tile", "broadcast_to"}
CASTING = {"to", "type_as"}  # take another tensor's dtype, and nothing of its values
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
# torch's functions of layers -> the names of their arguments
LAYERS: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "matmul": ("input", "weight"),  # x @ weight
    **dict.fromkeys(CONVOLUTIONS, ("input", "weight", "bias")),
}
FUNCTION = (
    "{kind} gives it to torch's {name} together with samples, through which they are not followed; through F.linear, "
    "x @ param, F.layer_norm and sums and products they are, and with gradwire.per_sample(param, x)"
)

DRAWN = "{kind} gives it to torch's {name}, which draws random numbers that cannot be drawn again"


class ModuleCall:
    """One run of a module's forward; ordinal: of torch's functions that were given one of its stands."""

    def __init__(self, module: nn.Module, tap: Tap) -> None:
        self.module, self.tap = module, tap
        self.following = tap.passes.following
        self.packing = packing()
        self.ordinal, self.open = 0, True

    def listens(self) -> bool:
        """Inside a checkpoint within this forward nothing is changed, for it runs once more without stands."""
        differentiated = torch.is_grad_enabled() or self.following is not None  # not yet, by a reentrant checkpoint
        return self.open and differentiated and bool(self.packing == packing())

    def place(self, part: str, dims: int) -> Where:
        """Where the samples lie in what this function puts out, as it was followed."""
        found = self.tap.passes.batch_axis.find(self.tap.name, part, dims)
        assert found is not None  # otherwise there are no stands
        if found.doubt not in (None, NOWHERE):
            for account in self.tap.accounts.values():
                account.hint = self.tap.reason(found.doubt or "")
        return found


def packing() -> Any:
    """What packs the tensors that are saved now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class StandIn(Tensor):
    """Stands for a parameter, or for what was computed of parameters alone.

    actual: the very tensor; parameter: it, where it is one. twin: the same computed of `leaves` (name -> leaf), apart
    from the model's graph, which may be gone when contributions to what was computed are taken back to the parameters.
    """

    call: ModuleCall
    parameter: nn.Parameter
    actual: Tensor
    twin: Tensor
    leaves: dict[str, Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return handle(func, args, kwargs or {})


def stand(call: ModuleCall, actual: Tensor, twin: Tensor, leaves: dict[str, Tensor]) -> StandIn:
    """An alias with a history, so that no gradient is lost in code that asks no torch function."""
    if call.following is None:
        made = actual.as_subclass(StandIn)
    else:  # a fake tensor has no alias of another class, and nobody computes
        with _disable_current_modes():
            made = torch.empty(0).as_subclass(StandIn)
    made.call, made.actual, made.twin, made.leaves = call, actual, twin, leaves
    return made


def plain(tree: Any) -> Any:
    """The same with what the stands stand for."""
    return pytree.tree_map(lambda leaf: leaf.actual if type(leaf) is StandIn else leaf, tree)


def handle(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """func of what the stands stand for, and its result watched where samples come to a parameter."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    stands = [leaf for leaf in tensors if type(leaf) is StandIn]
    others = [leaf for leaf in tensors if type(leaf) is not StandIn]
    call, name = stands[0].call, func.__name__
    given = plain((args, dict(kwargs)))
    if not call.listens():
        return func(*given[0], **given[1])
    call.ordinal += 1
    part = f"{call.ordinal} {name}"
    if call.following is not None:
        return followed(call, part, partial(func, *given[0], **given[1]), name, tensors)
    if name in ELEMENTWISE and len(stands) == len(others) == 1:
        shape = torch.broadcast_shapes(stands[0].actual.shape, others[0].shape)  # type: ignore[no-untyped-call]
        axis = call.place(part, len(shape)).axis
        if axis is not None:
            return spread(func, args, kwargs, stands[0], shape, axis, part)
    result = func(*given[0], **given[1])
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    place = call.place(part, result.ndim)
    if place.doubt == NOWHERE:
        return derived(func, args, kwargs, result, stands)
    if place.axis is None:
        return result
    return watched(result, stands[0], part) if name in SPREADING else by_layer(name, args, kwargs, result, call, part)


# ---- what a function does, judged where the batch has a size that nothing else has


def followed(call: ModuleCall, part: str, run: Callable[[], Any], name: str, tensors: Sequence[Tensor]) -> Any:
    """Notes where the samples lie in what comes out: nowhere, along an axis to be watched, or not to be followed."""
    with Drawing() as drawing:  # type: ignore[no-untyped-call]
        result = run()
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return result
    assert call.following is not None
    kind, where = path_of(type(call.module)), call.following.rows.where(result)
    if drawing.drawn:
        where = Where(None, doubt=DRAWN.format(kind=kind, name=name))
    elif not is_known(call, name, tensors, where, result.shape):
        where = Where(None, doubt=FUNCTION.format(kind=kind, name=name))
    call.following.found.append(((call.tap.name, part, result.ndim), where))
    return stand(call, result, result, {}) if where.doubt == NOWHERE else result


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells whether random numbers are drawn: what is computed so cannot be computed again."""

    drawn = False

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def is_known(call: ModuleCall, name: str, tensors: Sequence[Tensor], where: Where, shape: torch.Size) -> bool:
    """Whether what this function does with its stands can be told sample by sample."""
    assert call.following is not None
    rows, stands = call.following.rows, [one for one in tensors if type(one) is StandIn]
    met = [type(one) is not StandIn and rows.where(one).doubt != NOWHERE for one in tensors]
    if where.doubt == NOWHERE:
        return not any(met) or name in CASTING
    if name == "matmul" and stands[0].actual.ndim != 2:
        return False
    module = call.module
    if name in CONVOLUTIONS and not (isinstance(module, _ConvNd) and module.padding_mode == "zeros"):
        return False  # only where a convolution's weight is computed: its function is given what it was called on
    if name in LAYERS:
        return met[0] and not any(met[1:])
    alone = len(stands) == 1 and where.axis is not None and spreads(stands[0].actual.shape, shape, where.axis)
    return alone and (name in SPREADING or (name in ELEMENTWISE and len(met) == 2 and any(met)))


def spreads(shape: torch.Size, result: torch.Size, axis: int) -> bool:
    """Whether a tensor of that shape is broadcast to the result, along the samples among others."""
    if len(shape) > len(result):
        return False
    aligned = (1,) * (len(result) - len(shape)) + tuple(shape)
    return aligned[axis] == 1 and all(one in (1, size) for one, size in zip(aligned, result, strict=True))


# ---- what is done with it


def derived(func: Any, args: Any, kwargs: Any, result: Tensor, stands: Sequence[StandIn]) -> Tensor:
    """What is computed of stands alone is one too; everything else in it is constant."""

    def counterpart(leaf: Any) -> Any:
        return leaf.twin if type(leaf) is StandIn else leaf.detach() if isinstance(leaf, Tensor) else leaf

    with torch.enable_grad():
        given = pytree.tree_map(counterpart, (args, dict(kwargs)))
        twin = func(*given[0], **given[1])
    if not twin.requires_grad:  # its data alone
        return result
    return stand(stands[0].call, result, twin, {name: leaf for one in stands for name, leaf in one.leaves.items()})


def spread(func: Any, args: Any, kwargs: Any, one: StandIn, shape: torch.Size, axis: int, part: str) -> Any:
    """func with the parameter expanded to the samples, whose gradient then comes sample by sample."""
    aligned = (1,) * (len(shape) - one.actual.ndim) + tuple(one.actual.shape)
    expanded = one.actual.reshape(aligned).expand(*aligned[:axis], shape[axis], *aligned[axis + 1 :])
    by_sample = watched(expanded, one, part)
    return func(*(by_sample if leaf is one else leaf for leaf in args), **kwargs)


def watched(expanded: Tensor, one: StandIn, part: str) -> Tensor:
    """The expanded parameter, its gradient reported as contributions."""
    return seen(one.call, expanded, (), part, partial(contributions, one))


Formula = Callable[[Tensor, tuple[Tensor, ...], LayerCall], Uses]


def seen(call: ModuleCall, output: Tensor, saved: Sequence[Tensor], part: str, formula: Formula) -> Tensor:
    """The output, watched by a tap of its own."""
    owner = call.tap

    def staged(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], used: LayerCall) -> Uses:
        return formula(gradient, saved, used) if owner.live else ()

    return watch(Tap(None, Layer({part: staged}), None, owner.accounts, owner.passes, owner.name), output, saved, part)


def contributions(one: StandIn, gradient: Tensor, saved: tuple[Tensor, ...], used: LayerCall) -> Uses:
    """c_b = the gradient of the expanded tensor at sample b, through what was computed of the parameter before.

    gradient [.., B, ..], the other axes as the stand's, or longer where it had 1 and was expanded.
    """
    first, shape = used.samples_first(gradient), one.actual.shape
    aligned = (1,) * (gradient.ndim - len(shape)) + tuple(shape)
    rest = [size for axis, size in enumerate(aligned) if axis != used.axis]
    found = first.sum_to_size(first.shape[0], *rest).reshape(first.shape[0], *shape)
    yield from through(one, Direct(found))


def by_layer(name: str, args: Any, kwargs: Any, result: Tensor, call: ModuleCall, part: str) -> Tensor:
    """The result of a layer's function, watched as that layer's."""
    named = dict(zip(LAYERS[name], args, strict=False)) | kwargs
    layers: dict[str, Any] = {"linear": linear, "matmul": transposed_linear, **dict.fromkeys(CONVOLUTIONS, convolution)}
    formula = partial(layers[name], call.module) if name in layers else partial(normalized, name, named)
    stands = {local: value for local, value in named.items() if type(value) is StandIn}

    def uses(gradient: Tensor, saved: tuple[Tensor, ...], used: LayerCall) -> Uses:
        wanted = used.wanted
        used.wanted = frozenset(stands)  # by the function's names for them
        found = list(formula(gradient, saved, used))
        used.wanted = wanted
        for local, use in found:
            if local in stands:
                yield from through(stands[local], use)

    return seen(call, result, (named["input"],), part, uses)


def normalized(
    name: str, named: Mapping[str, Any], gradient: Tensor, saved: tuple[Tensor, ...], used: LayerCall
) -> Uses:
    """As the layers of these functions."""
    centered = name == "layer_norm"
    eps = named.get("eps", 1e-5 if centered else None)
    eps = torch.finfo(exact_dtype(gradient)).eps if eps is None else eps
    return by_feature(gradient, saved, used, torch.Size(named["normalized_shape"]), eps, centered)


def through(one: StandIn, use: Use) -> Uses:
    """A use of a stand as uses of the parameters that it was computed of."""
    for name in one.leaves:
        if one.twin is one.leaves[name]:
            yield name, use
        elif isinstance(use, Direct):
            yield name, Direct(taken_back(one, name, use.contributions))
        else:
            yield name, Through(use, one, name)


def taken_back(one: StandIn, name: str, found: Tensor) -> Tensor:
    """Contributions [B, *] to what was computed -> those to a parameter that it was computed of, by the chain rule."""
    leaf = one.leaves[name]
    if not found.shape[0]:
        return leaf.new_zeros(0, *leaf.shape)
    (taken,) = torch.autograd.grad(
        one.twin, leaf, found.to(one.twin.dtype), retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    return leaf.new_zeros(found.shape[0], *leaf.shape) if taken is None else taken


@dataclass
class Through(Use):
    """c_b of a parameter, from what is computed of it being used by a layer (weight_norm): one sample at a time."""

    inner: Use
    one: StandIn
    name: str

    def __post_init__(self) -> None:
        self.samples = self.inner.samples

    def sample(self, index: int) -> Tensor:
        return taken_back(self.one, self.name, self.inner.sample(index)[None])[0]

    def total(self) -> Tensor:
        return taken_back(self.one, self.name, self.inner.total()[None])[0]

    def noise(self) -> float:
        return self.inner.noise()

    def folded(self, outer: int, samples: int, inner: int) -> Through:
        return Through(self.inner.folded(outer, samples, inner), self.one, self.name)


# ---- a module's forward


@contextmanager
def standing(module: nn.Module, call: ModuleCall) -> Iterator[None]:
    """Stands in the parameters' places: an attribute of the instance comes before a parameter."""
    places: list[tuple[dict[str, Any], str]] = []
    for name in call.tap.accounts:
        path, _, local = name.rpartition(".")
        places.append((module.get_submodule(path).__dict__, local))
        param = module.get_parameter(name)
        leaf = param.detach().requires_grad_()
        # followed as if none were frozen, since that may change
        made = stand(call, param if call.following is None else leaf, leaf, {name: leaf})
        made.parameter = param
        places[-1][0][local] = made
    try:
        yield
    finally:
        call.open = False
        for attributes, local in places:
            attributes.pop(local, None)


def own_forward(module: nn.Module, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, with stands."""
    followed = tap.passes.following is not None or tap.passes.batch_axis.followed
    if torch.compiler.is_compiling() or tap.named or not followed:
        return type(module).forward(module, *args, **kwargs)
    with standing(module, ModuleCall(module, tap)):
        return plain(type(module).forward(module, *args, **kwargs))


OWN = Layer({}, (), own_forward)
# Modules that give torch's functions the weights of their layers, and never call those.
BORROWERS = {
    "torchvision.models.swin_transformer.ShiftedWindowAttention": ("qkv", "proj"),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": ("qkv", "proj"),
}
