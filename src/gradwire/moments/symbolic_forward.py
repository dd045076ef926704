"""Step 1, moments: the model run once on fake tensors whose batch is a symbol: where each layer puts its samples.

Nothing is computed and no parameter, buffer or attribute of the model is touched. A dim of size s (the symbol) is the
batch; one of size 6 s holds six rows a sample, and in which order they lie follows from the views that made it.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
import torch._refs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.moments.batch_axis import BY_DATA, MIXED, NOWHERE, REST, Key, Where, token_count
from gradwire.moments.convolution import Convolve, geometry_of
from gradwire.moments.registry import inner_of
from gradwire.moments.site import Pass

if TYPE_CHECKING:
    from gradwire.moments.recorder import Recorder
    from gradwire.moments.tap import Tap

aten = torch.ops.aten
Order = tuple[int, int] | None  # rows in front of and behind each sample's along a dim; None: they cannot be told
Orders = dict[Any, Order]  # by the size of the dim
ATTRIBUTE = "_gradwire_orders"
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# What gives the rows of its first input another order, or picks some of them.
REORDER = (
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default),
    *(aten.take.default, aten.sort.default, aten.sort.stable, aten.topk.default, aten.roll.default),
    *(aten.flip.default, aten.argsort.default, aten.argsort.stable, aten.as_strided.default),
)
# C++ that asks for numbers where there are symbols, and the same in Python
IN_PYTHON = {aten.constant_pad_nd.default: torch._refs.constant_pad_nd}
PARTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.unbind.int, aten.chunk.default)


class CannotFollow(Exception):  # noqa: N818 - it is no error, it is an answer
    """Why this model's batch axis cannot be followed."""


def follow(
    recorder: Recorder, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis: int
) -> list[tuple[Key, Where]]:
    """Where the samples lie in what each watched layer puts out, call by call."""
    why = ""
    # a path that is drawn at random while training cannot be followed, the one without chance can
    for training in dict.fromkeys((root.training, False)):
        try:
            return Forward(axis).run(recorder, root, args, kwargs, training)
        except CannotFollow:
            raise
        except Exception as error:  # anything that a model may do to a tensor without values
            why = why or f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    raise CannotFollow(why[:200])


class Forward:
    """One forward pass on fake tensors."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.shapes = ShapeEnv(duck_shape=False, specialize_zero_one=True)
        self.mode = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        self.batch: Any = None
        self.sizes: list[Any] = []  # the symbols of all inputs that are as long as the batch
        self._fakes: dict[int, Tensor] = {}  # what is one tensor stays one
        self.seen: list[tuple[Key, list[Any], list[Order]]] = []

    def run(
        self, recorder: Recorder, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> list[tuple[Key, Where]]:
        assert recorder.batch is not None
        twin = stand_in(inner_of(root), {})
        if not training:
            twin.eval()
        inputs = self._faked((args, dict(kwargs)), recorder.batch)
        if self.batch is None:
            raise CannotFollow("the first tensor that the model is called on is inside an object unknown here")
        self.rows = Rows(self.sizes)
        recorder.following = self
        try:
            with quiet(), self.mode, self.rows:
                # its own hooks are this recorder's where it is not wrapped
                (twin.forward if inner_of(root) is root else twin)(*inputs[0], **inputs[1])
        finally:
            recorder.following = None
        return list(self._found())

    @property
    def passed(self) -> Pass:
        """The pass now running, as a layer's forward asks for it."""
        return Pass(0, self.batch, self.tokens)

    def _faked(self, given: Any, batch: int) -> Any:
        """The inputs without values. All that are as long as the batch get symbols of their own: what the model adds
        to the batch turns out to be as long, and a mask [T, T] turns out to be T long, though T = B."""
        self.tokens = token_count(given) if self.axis == 0 else None

        return pytree.tree_map_only(Tensor, lambda tensor: self._fake(tensor, batch), given)

    def _fake(self, tensor: Tensor, batch: int) -> Tensor:
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = self._made(tensor, batch)
        return self._fakes[id(tensor)]

    def _made(self, tensor: Tensor, batch: int) -> Tensor:
        batched = tensor.ndim > self.axis and tensor.shape[self.axis] == batch
        if batched and batch < 2:  # 0 and 1 get no symbol
            shape = list(tensor.shape)
            shape[self.axis] = 2
            tensor = tensor.new_empty(shape)
        sizes = [
            DimDynamic.DYNAMIC if batched and dim == self.axis else DimDynamic.STATIC for dim in range(tensor.ndim)
        ]
        fake = self.mode.from_tensor(tensor.detach(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        if batched and isinstance(fake.shape[self.axis], torch.SymInt):
            size: Any = fake.shape[self.axis]
            self.batch = size if self.batch is None else self.batch
            self.sizes.append(size.node.expr)
        return fake

    def note(self, tap: Tap, part: str, output: Tensor) -> None:
        """A layer puts this out."""
        self.seen.append(((tap.name, part, output.ndim), list(output.shape), self.rows.of(output)))

    def _found(self) -> Iterator[tuple[Key, Where]]:
        batch = self.batch.node.expr
        if batch.is_number:
            raise CannotFollow(f"the model takes no other batch than one of {batch}")
        equal = {size: batch for size in self.sizes if self.shapes.replace(size).is_Symbol}
        for key, shape, orders in self.seen:
            yield key, where(shape, orders, batch, equal, self.shapes)


def where(shape: Sequence[Any], orders: Sequence[Order], batch: Any, equal: Mapping[Any, Any], env: ShapeEnv) -> Where:
    """The axis of the samples in a tensor, from the symbols in its shape."""
    found: list[Where] = []
    for axis, (size, order) in enumerate(zip(shape, orders, strict=True)):
        if not isinstance(size, torch.SymInt) or (expr := env.replace(size.node.expr)).is_number:
            continue
        expr = expr.xreplace({env.replace(one): batch for one in equal})
        each = sympy.simplify(expr / batch) if not free_unbacked_symbols(expr) else None
        if each is None or not each.is_Integer:
            found.append(Where(None, doubt=BY_DATA if each is None else MIXED))
        elif order is None or math.prod(order) != int(each):
            found.append(Where(None, doubt=MIXED))
        else:
            outer, inner = order
            # how many there are may depend on the length of a sequence; which lie in front does not
            inner, outer = (REST if outer == 1 < inner else inner), (REST if inner == 1 < outer else outer)
            found.append(Where(axis, outer, inner))
    if len(found) == 1:
        return found[0]
    return Where(None, doubt=MIXED if found else NOWHERE)


class Rows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows how the samples lie in dims that hold several rows of each.

    A dim of size s is taken for the batch itself unless something here says otherwise, a longer one is known only
    where all that made it is: a view, by how many elements lie behind a sample's coordinate; whatever keeps a dim of
    that size; several batches one after another.
    """

    def __init__(self, sizes: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = sizes[0]
        self._same = dict.fromkeys(sizes[1:], self.size)
        self._exprs: dict[Any, Any] = {}
        self._multiples: dict[Any, int] = {}

    def expr(self, size: Any) -> Any:
        """A size as an expression, with one symbol for the batch: those of several inputs may not have met yet."""
        if not isinstance(size, torch.SymInt):
            return sympy.Integer(size)
        expr = size.node.expr
        if expr not in self._exprs:
            self._exprs[expr] = expr.xreplace(self._same)
        return self._exprs[expr]

    def behind(self, tensor: Tensor, axis: int) -> Any:
        """How many elements lie behind one step along the axis, in a tensor that lies in order."""
        return math.prod(map(self.expr, tensor.shape[axis + 1 :]), start=sympy.Integer(1))

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = IN_PYTHON.get(func, func)(*args, **(kwargs or {}))
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        for output in pytree.tree_leaves(made):
            if isinstance(output, Tensor) and any(isinstance(size, torch.SymInt) for size in output.shape):
                orders = self._orders(func, args, given, output)
                if orders:
                    setattr(output, ATTRIBUTE, orders)
        return made

    def of(self, tensor: Tensor) -> list[Order]:
        """By dim, (1, 1) where there is nothing to say."""
        return [self.order(tensor, self.expr(size)) for size in tensor.shape]

    def _orders(self, func: Any, args: Any, given: Sequence[Tensor], output: Tensor) -> Orders:
        if func in VIEWS:
            return self._viewed(args[0], output)
        found: Orders = {}
        for size in {expr for expr in map(self.expr, output.shape) if self._times(expr)}:
            if func is aten.cat.default and self._whole_batches(args[0], size):
                found[size] = (len(args[0]), 1)
            elif func in PARTS and size == self.size and self._in_a_row(args[0]):
                continue
            elif func in REORDER and size != self.size and self._holds_samples(args[0]):
                found[size] = None
            elif (order := self._kept(size, given)) != (1, 1):
                found[size] = order
        return found

    def _times(self, expr: Any) -> int:
        """c of a size c s; 0 where it is no multiple of a batch."""
        if expr not in self._multiples:
            times = expr / self.size
            self._multiples[expr] = int(times) if times.is_Integer else 0
        return self._multiples[expr]

    def _holds_samples(self, tensor: Tensor) -> bool:
        return any(self._times(self.expr(size)) for size in tensor.shape)

    def _whole_batches(self, parts: Sequence[Tensor], size: Any) -> bool:
        """Whether so many batches are put one after another along the dim that is now of this size."""
        plain = all(self._kept(self.size, [part]) == (1, 1) for part in parts)
        return plain and self._times(size) == len(parts) > 1

    def _in_a_row(self, whole: Tensor) -> bool:
        """Whether it holds whole batches one after another, of which a part is one."""
        orders = [self.order(whole, self.expr(size)) for size in whole.shape if self._times(self.expr(size)) > 1]
        return len(orders) == 1 and orders[0] is not None and orders[0][1] == 1

    def order(self, tensor: Tensor, size: Any) -> Order:
        """How the samples lie along its dims of this size."""
        known: Orders = getattr(tensor, ATTRIBUTE, {})
        return known.get(size, (1, 1))

    def _kept(self, size: Any, given: Sequence[Tensor]) -> Order:
        """That of the inputs with a dim of this size, if they agree; without any it must be the batch, made anew."""
        found = {self.order(one, size) for one in given if any(self.expr(length) == size for length in one.shape)}
        if not found:
            made_anew = size == self.size and not any(self._times(self.expr(n)) > 1 for one in given for n in one.shape)
            return (1, 1) if made_anew else None
        return found.pop() if len(found) == 1 else None

    def _viewed(self, before: Tensor, after: Tensor) -> Orders:
        """A view leaves every element where it is: so many elements lie behind one step of the sample's coordinate."""
        sizes = [self.expr(length) for length in after.shape]
        there = [place for place, expr in enumerate(sizes) if self._times(expr)]
        origin = [place for place, length in enumerate(before.shape) if self._times(self.expr(length))]
        if len(there) != 1 or len(origin) != 1:
            return {sizes[place]: None for place in there}
        order = self.order(before, self.expr(before.shape[origin[0]]))
        inner = (order or (0, 0))[1] * self.behind(before, origin[0]) / self.behind(after, there[0])
        times = self._times(sizes[there[0]])
        if not inner.is_Integer or not inner or times % int(inner):
            return {sizes[there[0]]: None}
        found = (times // int(inner), int(inner))
        return {} if found == (1, 1) else {sizes[there[0]]: found}


def stand_in(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """A module over the same parameters, with attributes, tables and children of its own.

    What a forward leaves on its module, the tables of a rotary embedding or a cache, is left on this one.
    """
    module = inner_of(module)
    if id(module) in known:
        return known[id(module)]
    kind: Any = type(module)
    if isinstance(module, nn.RNNBase) and kind.forward in RECURRENT:
        kind = type(kind.__name__, (kind,), {"forward": recurrent})
    elif isinstance(module, _ConvNd) and isinstance(module.padding, str):
        kind = type(kind.__name__, (kind,), {"forward": padded_convolution})
    twin: nn.Module = object.__new__(kind)
    known[id(module)] = twin
    for key, value in vars(module).items():
        twin.__dict__[key] = copy.copy(value) if isinstance(value, dict | list | set) else value
    twin.__dict__["_compiled_call_impl"] = None
    for key, child in module._modules.items():
        twin._modules[key] = None if child is None else stand_in(child, known)
    for key, value in vars(module).items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            twin.__dict__[key] = types.MethodType(value.__func__, twin)
    return twin


def padded_convolution(self: Any, input: Tensor) -> Tensor:
    """padding="same", where torch's own pads by numbers too."""
    x, geometry = geometry_of(self, input, input)
    return Convolve(geometry)(x, self.weight, self.bias)


RECURRENT = (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)


def recurrent(self: Any, input: Tensor, hx: Any = None) -> Any:
    """What a recurrent layer puts out; torch's own asks for numbers where there are symbols."""
    if not isinstance(input, Tensor):
        raise CannotFollow("a recurrent layer is given packed sequences, whose samples lie as their lengths say")
    directions = 2 if self.bidirectional else 1
    out = self.proj_size or self.hidden_size
    batch = input.shape[:-1] if input.ndim == 2 else input.shape[0 if self.batch_first else 1]
    output = input.new_empty(*input.shape[:-1], directions * out)
    given = () if input.ndim == 2 else (batch,)
    state = input.new_empty(self.num_layers * directions, *given, out)
    if self.mode != "LSTM":
        return output, state
    return output, (state, input.new_empty(self.num_layers * directions, *given, self.hidden_size))


@contextmanager
def quiet() -> Iterator[None]:
    """Python's random numbers as before, warnings and torch's log of what it refuses held back."""
    state, level = random.getstate(), logging.root.manager.disable
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
            random.setstate(state)
