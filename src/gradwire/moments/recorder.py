"""Step 1, moments: the recorder: puts taps on a model, counts passes, and keeps a ledger for every parameter."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.errors import AttachError, MomentError
from gradwire.layout import in_shape
from gradwire.moments import inventory
from gradwire.moments.batch_axis import BatchAxis, batch_size, token_count
from gradwire.moments.broadcast import unwatch_parameter, watch_parameter
from gradwire.moments.compiled import RECORDERS, UNKNOWN, clock_of
from gradwire.moments.coverage import Row, report
from gradwire.moments.estimators import ESTIMATORS
from gradwire.moments.inventory import Owner
from gradwire.moments.ledger import Ledger
from gradwire.moments.passes import Ears, OutputHook, PassHook
from gradwire.moments.raw import RAW
from gradwire.moments.registry import BatchDim, Layer, axis_of, check_batch_dim, root_axis_of, told_axis
from gradwire.moments.signs import watch_signed
from gradwire.moments.site import Pass
from gradwire.moments.staged import current_task
from gradwire.moments.tap import ATTRIBUTE, Tap, install, is_free, transformed, uninstall

if TYPE_CHECKING:
    from gradwire.moments.capturing import Capturing
    from gradwire.moments.fake_forward import Forward
    from gradwire.moments.graphed import Graphed

_keys = itertools.count(1)
REMEMBERED = 64  # passes that may still be differentiated: validation without no_grad brings any number
SEVERAL = "a reentrant checkpoint cannot tell which of several forward passes it recomputes; use_reentrant=False can"


def seed_of(step: int, number: int) -> int:
    return int.from_bytes(blake2b(f"{step} {number}".encode(), digest_size=8).digest(), "little") >> 1


class Recorder:
    """sum_z c_z^2 for every parameter of a model, as its gradients stand in `.grad`.

    root: the module whose forward is called (DDP's); names: its trainable parameters by clean name.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[str, nn.Parameter],
        *,
        batch_dim: BatchDim = 0,
        estimator: str = "groups",
        exact: bool = True,
        strict: bool = False,
        same_samples: bool = True,
        batch_axis: BatchAxis | None = None,
    ) -> None:
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, but is {estimator!r}")
        if strict and not exact:
            raise ValueError("strict=True wants exact moments and exact=False forbids them; choose one")
        modules = {name: module for name, module, _ in inventory.modules_of(root)}
        check_batch_dim(batch_dim, modules)
        self._refuse_second(modules)
        self.root = weakref.ref(root)  # whose hooks hold this recorder
        self.batch_dim, self.estimator, self.exact, self.strict = batch_dim, estimator, exact, strict
        self.same_samples = same_samples  # of passes in one backward with as many of them
        self.root_axis = root_axis_of(batch_dim, root)
        self.batch_axis = BatchAxis(self.root_axis) if batch_axis is None else batch_axis
        self.following: Forward | None = None  # while the model runs without values
        self.batch: int | None = None
        self.tokens: int | None = None
        self.current = Pass(0, None)
        self.step, self._backwards = 0, 0
        self.paused: frozenset[str] = (
            frozenset()
        )  # parameters whose signed gradient is being taken, in a nested backward
        self.ran_backward = False
        self.capturing: Capturing | None = None  # takes all uses while a graph is captured
        self.graphs: list[Graphed] = []
        self.key = next(_keys)
        self.clock = clock_of(0, None)  # the pass now running, for compiled graphs
        self._open: deque[Pass] = deque(maxlen=REMEMBERED)
        self._reached: dict[int, Pass] = {}
        self._reached_in = -1
        self._tasks: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._taps: dict[nn.Module, Tap] = {}
        self._broadcasts: list[Tap] = []
        self.ledgers: dict[str, Ledger] = {}
        self.ears = Ears(self.ledgers)
        try:
            self._open_ledgers(root, names)
            self._install(root)
        except BaseException:
            self.remove()  # a recorder that failed leaves no trace
            raise
        RECORDERS[self.key] = self

    # ---- setting up

    @staticmethod
    def _refuse_second(modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            tap = module.__dict__.get(ATTRIBUTE)
            if tap and tap.live and tap.recorder.root() is None:
                tap.recorder.remove()  # of a model that is gone: a notebook's cell puts the same layers into a new net
            if tap and tap.live:
                raise AttachError(
                    f"{name!r} ({type(module).__name__}) is being recorded already, for another model that shares it: "
                    "del it if nothing trains it any more; wire.detach() it and train it one step more; or give one of "
                    "the two a method without second moments, such as gradwire.TopK()"
                )

    def _open_ledgers(self, root: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
        owners = inventory.owners_of(root)
        plans: list[tuple[Ledger, list[Owner]]] = []
        for name, param in names.items():
            held = owners.get(id(param), [])
            never = next((why for owner in held if (why := inventory.why_never(owner))), None)
            never = never if self.exact else "exact=False"
            raw = next((why for owner in held if (why := inventory.why_raw(owner))), None)
            if never and self.strict:
                raise MomentError(
                    f"strict=True wants exact moments, but that of {name!r} (shape {tuple(param.shape)}) "
                    f"can only be estimated: {never}. Replace the layer, or attach with strict=False"
                )
            ledger = Ledger(name, param, self, never, raw if held else inventory.UNKNOWN.format(kind="module unknown"))
            ledger.shared = len(held) > 1
            self.ledgers[name] = ledger
            plans.append((ledger, held))
        for ledger, held in plans:
            self._plan(ledger, held)

    def _plan(self, ledger: Ledger, held: list[Owner]) -> None:
        """Decides which taps bring this parameter's uses."""
        for owner in held:
            layer = owner.layer
            if not is_free(owner.module):
                continue
            known = ledger.never is None and layer is not None
            if known:
                self._tap(owner, owner.module, layer).ledgers[owner.local] = ledger
            if self.estimator == "signs" and (not known or layer is RAW):
                tap = self._tap(owner, owner.module, layer)
                tap.signed[ledger.name], tap.after = ledger, watch_signed
        name, lineage = (held[0].name, held[0].lineage) if held else ("", ())
        self._broadcasts.append(watch_parameter(ledger, axis_of(self.batch_dim, name, None, lineage)[0], self))

    def _tap(self, owner: Owner, module: nn.Module, layer: Layer | None) -> Tap:
        if module not in self._taps:
            axis, named = axis_of(self.batch_dim, owner.name, layer, owner.lineage)
            positions = told_axis(self.batch_dim, owner.name)[0] == "positions"
            # positions get their batch axis where the model's own is
            self._taps[module] = Tap(module, layer, self.root_axis if positions else axis, {}, self, owner.name, named)
            self._taps[module].positions = positions
        return self._taps[module]

    def _install(self, root: nn.Module) -> None:
        for module, tap in self._taps.items():
            install(module, tap)
        self.ears.open()
        self._handles.append(root.register_forward_pre_hook(PassHook(self), with_kwargs=True))
        self._handles.append(root.register_forward_hook(OutputHook(self)))

    def hear(self, ledger: Ledger) -> None:
        """Of an estimated parameter the gradient also before it is accumulated."""
        self.ears.hear_more(ledger)

    def hush(self) -> None:
        """Without hooks on parameters, where the pass now beginning is the only one open: its graph does without."""
        if len(self._open) == 1:
            self.ears.close()

    # ---- passes and graph tasks

    @property
    def passes(self) -> int:
        return self.current.number

    def begin_step(self, step: int) -> None:
        """The adapter's step counter: signs follow from (step, n-th backward in it), so that a resumed run agrees."""
        self.step, self._backwards = step, 0

    @property
    def seed(self) -> int:
        """Of the random signs in the backward now running."""
        return seed_of(self.step, self._backwards)

    def on_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = batch_size((args, kwargs), self.root_axis)
        tokens = token_count((args, kwargs)) if self.root_axis == 0 else None
        if torch.compiler.is_compiling():
            self.batch, self.tokens = batch, tokens
            known = [UNKNOWN if size is None else size for size in (batch, tokens)]
            self.clock = torch.ops.gradwire.begin(self.clock, self.key, *known)
        else:
            self.begin(batch, tokens)
            if torch.is_grad_enabled() and not transformed():
                self.batch_axis.learn(self, root, args, kwargs)

    def begin(self, batch: int | None, tokens: int | None = None) -> None:
        """A forward pass begins."""
        self.batch, self.tokens = batch, tokens
        self.current = Pass(self.passes + 1, batch, tokens)
        self.clock = clock_of(self.passes, batch)
        if self.ran_backward:
            self._open.clear()
            self.ran_backward = False
        if torch.is_grad_enabled():
            self._open.append(self.current)
        if self._tasks and current_task() == -1:  # a backward raised: its callback never came
            for task in list(self._tasks):
                self._leave_task(task)

    def reach(self, passed: Pass) -> None:
        """The backward now running goes through this pass."""
        self.enter_task()
        if self._reached_in != current_task():
            self._reached, self._reached_in = {}, current_task()
        self._reached[passed.number] = passed

    def reach_by_tap(self, number: int, batch: int | None) -> None:
        """From a compiled graph, which takes no hook on its output."""
        if self._reached_in == -1 or self._reached_in == current_task():
            self.reach(self._reached.get(number, Pass(number, batch)))

    @property
    def open_samples(self) -> int | None:
        """How many samples the backward now running has, as far as can be told."""
        batches = [passed.batch for passed in self._reached.values() or self._open]
        known = [batch for batch in batches if batch is not None]
        return None if len(known) < max(1, len(batches)) else sum(set(known) if self.same_samples else known)

    def now(self) -> Pass:
        """The pass of a layer called now; a reentrant checkpoint calls it from inside backward."""
        if self.following is not None:
            return self.following.passed
        if torch.compiler.is_compiling():
            return Pass(0, self.batch, self.tokens)  # its number is known when it runs
        if current_task() == -1:
            return self.current
        passes = list(self._reached.values()) or list(self._open)
        if len(passes) == 1:
            return passes[0]
        return self.current._replace(doubt=SEVERAL) if passes else self.current

    def enter_task(self) -> None:
        """Has what this backward stages dropped at its end: unless a gradient arrived, it did not count."""
        task = current_task()
        if task != -1 and task not in self._tasks:
            self._backwards += not self._tasks  # one inside another is a part of it
            self._tasks.add(task)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._leave_task(task))

    def _leave_task(self, task: int) -> None:
        self._tasks.discard(task)
        if task == self._reached_in:
            self._reached, self._reached_in = {}, -1
        self.ran_backward = True
        if self.capturing is not None:
            self.capturing.finish()
        for ledger in self.ledgers.values():
            ledger.staged.pop(task, None)

    # ---- what the adapter calls

    def bind(self, name: str, destination: Tensor) -> None:
        """The moment lives in `destination` (float32, 1-D) from now on; what was committed so far comes along."""
        self.ledgers[name].bind(destination)

    def seen(self, name: str) -> bool:
        """Whether a gradient arrived since the last consume."""
        return self.ledgers[name].seen()

    def consume(self, name: str, grad: Tensor) -> None:
        """Completes an estimated moment from the accumulated gradient (1-D); the next commit overwrites."""
        self.ledgers[name].consume(grad)

    def moment(self, name: str) -> Tensor:
        """The moment as it stands, in the parameter's shape; estimated ones are complete after consume."""
        ledger = self.ledgers[name]
        return in_shape(ledger.moment, ledger.param)

    def coverage(self) -> list[Row]:
        """One row a parameter: exact or estimated, and why."""
        return report(self.ledgers.values())

    def release(self) -> None:
        """Forwards without graphs again."""
        for graph in self.graphs:
            graph.release()
        self.graphs.clear()

    def remove(self) -> None:
        """Restores every forward and removes every hook; the moments stay readable."""
        self.release()
        self.ears.close()
        for handle in self._handles:
            handle.remove()
        for module, tap in self._taps.items():
            uninstall(module, tap)
        for tap in self._broadcasts:
            unwatch_parameter(tap)
        self._handles.clear()
        self._taps.clear()
        self._broadcasts.clear()
        RECORDERS.pop(self.key, None)
