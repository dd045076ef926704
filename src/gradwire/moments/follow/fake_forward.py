"""Step 1, moments: the model run once without values, on a batch of unusual size: where each layer puts its samples.

Nothing is computed, and no parameter, buffer or attribute of the model is touched: torch's fake tensors have a shape
and no memory.
"""

from __future__ import annotations

import copy
import functools
import io
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from gradwire.moments.batch_axis import MIXED, CannotFollow, Found, Key, Where, tensors_in, token_count
from gradwire.moments.batch_dim import inner_of
from gradwire.moments.follow.row_order import DECIDED, POSITIONS, UNUSUAL, RowOrder, numbers
from gradwire.moments.layer_call import path_of
from gradwire.moments.layers.broadcast import WATCHED
from gradwire.moments.passes import ModelPasses, Pass
from gradwire.moments.swapped_forward import ATTRIBUTE as TAP

if TYPE_CHECKING:
    from gradwire.moments.layer_call import Tap

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Axes = dict[int, int]


def follow(passes: ModelPasses, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis: int) -> Found:
    """Where the samples lie in what each watched layer puts out, call by call, and which embeddings are positions.

    All inputs that are as long as the batch are taken for batches, unless the model does not take them together. One
    that has a second axis as long may be a mask [T, T]: it is taken for one where the model takes that.
    """
    given = (args, dict(kwargs))
    why, muddled = "", None
    for axes in choices(given, axis, passes.batch):
        # a path that is drawn at random while training cannot be followed, the one without chance can
        for training in dict.fromkeys((root.training, False)):
            try:
                found = whatever_the_data(functools.partial(FakeForward, passes, axis, root, given, axes, training))
            except CannotFollow:
                raise
            except Exception as error:  # anything that a model may do to a tensor without values
                why = why or f"{type(error).__name__}: {error}"
                continue
            if all(where.doubt != MIXED for _, where in found[0]):
                return found
            muddled = muddled or found
        if "DataDependent" in why:  # whatever the inputs are taken for
            break
    if muddled is not None:
        return muddled
    raise CannotFollow(" ".join(why.split())[:200])


def choices(given: Any, axis: int, batch: int | None) -> list[Axes]:
    """Along which axes of the inputs the samples may lie, the likeliest first; id of an input -> its axis."""
    tensors = {id(one): one for one in tensors_in(given)}
    found = {key: [each for each in (axis, 0) if as_long(one, each, batch)] for key, one in tensors.items()}
    along = {key: each[0] for key, each in found.items() if each}
    if not along:
        raise CannotFollow("no tensor that it is called on has as many samples as the first")
    others = list(along)[1:]
    # a padding mask [B, S] has samples first, where the sequences have them second
    masks = along | {key: found[key][-1] for key in others}
    square = [key for key in others if batch != 1 and tensors[key].shape[:2] == (batch, batch)]
    left_out = [square, *[[key] for key in square], [], *[[key] for key in others], others]
    made = [{key: at for key, at in each.items() if key not in out} for out in left_out for each in (along, masks)]
    # a recurrent layer's state [layers, B, H] has samples second, where the sequences have them first
    states = {key: 1 for key, one in tensors.items() if key not in along and as_long(one, 1, batch)}
    made += [each | states for each in (along, masks)]
    return list({tuple(each.items()): each for each in made}.values())


def whatever_the_data(make: Callable[[int, frozenset[str]], FakeForward]) -> Found:
    """As if all numbers that are read from the data were 1, and as if they were 0: a branch may go either way."""
    notes: list[tuple[Key, Where]] = []
    every: list[frozenset[str]] = []
    failure: Exception | None = None
    for number in (1, 0):
        plain = make(number, frozenset())
        try:
            found, positions = with_positions(plain, functools.partial(make, number))
            notes += found
            every.append(positions)
        except Exception as error:  # no such number may come
            failure = failure or error
        if not plain.rows.asked:
            break
    if not every:
        assert failure is not None
        raise failure
    return notes, frozenset.intersection(*every)


def with_positions(plain: FakeForward, make: Callable[[frozenset[str]], FakeForward]) -> Found:
    """Positions are given the batch where the model then puts out as much, and does nothing with them but add them."""
    plain.run()
    shared = [frozenset(plain.shared), *[frozenset([name]) for name in sorted(plain.shared)]]
    for names in dict.fromkeys(shared) if plain.shared else ():
        spread = make(names)
        try:
            spread.run()
        except Exception:  # the longer output does not fit: these are no positions
            continue
        if spread.output == plain.output and not spread.rows.misused:
            return spread.found, names
    return plain.found, frozenset()


def as_long(one: Any, axis: int, batch: int | None) -> bool:
    """Whether it has as many entries as there are samples, or one more: offsets of bags with the last one's end."""
    if not isinstance(one, Tensor) or one.ndim <= axis or batch is None:
        return False
    offsets = one.ndim == 1 and not one.is_floating_point() and one.shape[axis] == batch + 1
    return one.shape[axis] == batch or offsets


@dataclass(eq=False)
class FakeForward:
    """One forward pass on fake tensors."""

    passes: ModelPasses
    axis: int
    root: nn.Module
    given: Any
    axes: Axes  # of the samples, by the id of each input that has them
    training: bool
    number: int  # what is read from the data is taken for it
    positions: frozenset[str]  # embeddings whose ids are given the batch

    def __post_init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)
        self.rows = RowOrder(self.number)
        self.batch, self.samples = 0, self.passes.batch or 0
        self.tokens: int | None = None
        self.found: list[tuple[Key, Where]] = []
        self.output: Any = None  # the shapes of what the model puts out
        self.shared: set[str] = set()  # embeddings given ids that are the same for all samples
        self._labels: set[str] = set()  # and those given one for each
        self._fakes: dict[int, Tensor] = {}  # what is one tensor stays one
        self._copies: dict[int, Any] = {}  # by the id of what they are copies of

    def run(self) -> None:
        model = inner_of(self.root)
        held = [*model.parameters(), *model.buffers(), *tensors_in(self.given)]
        sizes = {size for one in held for size in one.shape}
        self.batch = self.rows.batch = unlike(sizes, UNUSUAL)
        self.rows.decided = unlike(sizes, DECIDED)
        self.tokens = token_count(self.given) if self.axis == 0 else None
        with quiet(), self.mode, self._listening():
            with Faked(self._fake):
                twin = self._stand_in(model)
                args, kwargs = self._copied(self.given)
            if not self.training:
                twin.eval()
            with self.rows:
                output = twin(*args, **kwargs)
        self.output = [numbers(one) for one in tensors_in(output)]
        self.shared -= self._labels

    @property
    def passed(self) -> Pass:
        """The pass now running, as a layer's forward asks for it."""
        return Pass(0, self.batch, self.tokens)

    def note(self, tap: Tap, part: str, output: Tensor) -> None:
        """A layer puts this out."""
        self.found.append(((tap.name, part, output.ndim), self.rows.where(output)))

    def spreads(self, tap: Tap, ids: Tensor) -> bool:
        """Whether an embedding's ids [T] or [1, T] are given the batch."""
        (self._labels if self.rows.where(ids).doubt is None else self.shared).add(tap.name)
        return tap.name in self.positions and tap.name not in self._labels

    def mark(self, ids: Tensor) -> None:
        """These ids were given the batch."""
        setattr(ids, POSITIONS, True)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """The taps tell this run what they see; per_sample knows the parameters' stand-ins."""
        self.passes.following = self
        try:
            yield
        finally:
            self.passes.following = None
            for fake in self._fakes.values():
                WATCHED.pop(id(fake), None)

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._fakes:
            if id(tensor) in self.axes:
                shape = list(tensor.shape)
                shape[self.axes[id(tensor)]] += self.batch - self.samples
                fake = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            else:
                fake = self.mode.from_tensor(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            else:
                fake.requires_grad_(tensor.requires_grad)
            self._fakes[id(tensor)] = fake
            if id(tensor) in WATCHED:
                WATCHED[id(fake)] = WATCHED[id(tensor)]
        return self._fakes[id(tensor)]

    def _stand_in(self, model: nn.Module) -> nn.Module:
        """A module of the same class, with parameters, buffers, attributes, tables and children of its own.

        What a forward leaves on its module, a batch norm's statistics or a cache, is left on this one.
        """
        modules = {id(module): inner_of(module) for module in model.modules()}
        twins = {id(module): object.__new__(type(module)) for module in modules.values()}
        taps = [vars(module)[TAP] for module in modules.values() if TAP in vars(module)]
        self._copies = {key: twins[id(module)] for key, module in modules.items()}
        self._copies |= {id(one): one for one in (*taps, self.passes)}
        self._copies |= {id(param): self._fake(param) for param in model.parameters()}
        for module in {id(module): module for module in modules.values()}.values():
            twin = twins[id(module)]
            if not isinstance(forward := vars(module).get("forward"), types.MethodType | None):
                # it knows the module, not its stand-in: Lightning's runs the training step and puts the real one back
                where = getattr(forward, "__module__", type(forward).__module__)
                raise CannotFollow(f"the forward of {path_of(type(module))} was replaced by a function of {where}")
            for key, value in vars(module).items():
                twin.__dict__[key] = self._copied(value) if key not in HOOKS else without_users(value)
            twin.__dict__["_compiled_call_impl"] = None
        return twins[id(model)]

    def _copied(self, value: Any) -> Any:
        """All of it, tensors without values; what has no copy is shared."""
        count = len(self._copies)
        try:
            return copy.deepcopy(value, self._copies)
        except Exception:  # a lock, a file, a process group
            while len(self._copies) > count:  # what is half made
                self._copies.popitem()
        if type(value) is dict:
            return {key: self._copied(one) for key, one in value.items()}
        return [self._copied(one) for one in value] if type(value) is list else value


class Faked(TorchFunctionMode):
    """Deep copies of tensors are fake ones."""

    def __init__(self, fake: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.fake(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def is_of_torch(hook: Any) -> bool:
    """A hook that makes a weight (weight_norm, pruning); a user's may keep what it sees."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] == "torch"


def unlike(sizes: set[int], offered: Sequence[int]) -> int:
    """One of which none of these sizes is a multiple."""
    return next((one for one in offered if all(size % one for size in sizes if size)), offered[0])


def without_users(table: dict[int, Any]) -> dict[int, Any]:
    """A module's hooks but for the user's."""
    return type(table)((key, hook) for key, hook in table.items() if is_of_torch(hook))


@contextmanager
def quiet() -> Iterator[None]:
    """Random numbers outside torch as before; warnings, prints and torch's log of what it refuses held back."""
    state, level = random.getstate(), logging.root.manager.disable
    numpy_state = numpy.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(_disable_current_modes())  # a user's counter of operations
        # a checkpoint around the whole model counts what is saved, and a user's hook may want the values
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
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
            numpy.random.set_state(numpy_state)
