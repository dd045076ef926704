"""Step 1, moments: the recorder: puts taps on a model, counts passes, and keeps a ledger for every parameter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.errors import MomentError
from gradwire.layout import in_shape
from gradwire.moments import inventory
from gradwire.moments.broadcast import unwatch_parameter, watch_parameter
from gradwire.moments.compiled import RECORDERS, UNKNOWN
from gradwire.moments.coverage import Row, report
from gradwire.moments.estimators import ESTIMATORS
from gradwire.moments.inventory import Owner
from gradwire.moments.ledger import Ledger, current_task
from gradwire.moments.passes import PassHook, batch_size, weakly
from gradwire.moments.registry import BatchDim, Layer, axis_of, check_batch_dim, told_axis
from gradwire.moments.signs import watch_signed
from gradwire.moments.tap import ATTRIBUTE, Tap, install, is_free, uninstall

_keys = itertools.count(1)
REMEMBERED = 16  # passes whose signs are kept: more than any one backward goes through


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
    ) -> None:
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, but is {estimator!r}")
        if strict and not exact:
            raise ValueError("strict=True wants exact moments and exact=False forbids them; choose one")
        modules = {name: module for name, module, _ in inventory.modules_of(root)}
        check_batch_dim(batch_dim, modules)
        self._refuse_second(modules)
        self.batch_dim, self.estimator, self.exact, self.strict = batch_dim, estimator, exact, strict
        self.batch: int | None = None
        self.passes = 0
        self.paused: frozenset[str] = (
            frozenset()
        )  # parameters whose signed gradient is being taken, in a nested backward
        self.largest = 0.0
        self.ran_backward = False
        self.key = next(_keys)
        self.clock = torch.zeros(1, dtype=torch.int64)  # orders taps after `begin` in a compiled graph
        self._open: list[tuple[int, int | None]] = []
        self._tasks: set[int] = set()
        self._signs: dict[int, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)
        self._handles: list[RemovableHandle] = []
        self._taps: dict[nn.Module, Tap] = {}
        self._broadcasts: list[Tap] = []
        self.ledgers: dict[str, Ledger] = {}
        RECORDERS[self.key] = self
        self._open_ledgers(root, names)
        self._install(root)

    # ---- setting up

    @staticmethod
    def _refuse_second(modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            tap = module.__dict__.get(ATTRIBUTE)
            if tap and tap.live:
                raise RuntimeError(
                    f"{name!r} ({type(module).__name__}) is being recorded already; remove() the first recorder"
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
            ledger = Ledger(name, param, self, never, raw if held else inventory.RAW.format(kind="module unknown"))
            ledger.shared = len(held) > 1
            self.ledgers[name] = ledger
            plans.append((ledger, held))
        for ledger, held in plans:
            self._plan(ledger, held)

    def _plan(self, ledger: Ledger, held: list[Owner]) -> None:
        """Decides which taps bring this parameter's uses."""
        for owner in held:
            layer = owner.layer
            if ledger.never is None and layer is not None and is_free(owner.module):
                self._tap(owner, owner.module, layer).ledgers[owner.local] = ledger
            elif self.estimator == "signs":
                speaker = inventory.speaker(owner)
                if is_free(speaker):
                    tap = self._tap(owner, speaker, layer)
                    tap.signed[ledger.name], tap.after = ledger, watch_signed
        name, lineage = (held[0].name, held[0].lineage) if held else ("", ())
        self._broadcasts.append(watch_parameter(ledger, axis_of(self.batch_dim, name, None, lineage)[0], self))

    def _tap(self, owner: Owner, module: nn.Module, layer: Layer | None) -> Tap:
        if module not in self._taps:
            axis, named = axis_of(self.batch_dim, owner.name, layer, owner.lineage)
            self._taps[module] = Tap(module, layer, axis, {}, self, named)
        return self._taps[module]

    def _install(self, root: nn.Module) -> None:
        for module, tap in self._taps.items():
            install(module, tap)
        for ledger in self.ledgers.values():
            param: Any = ledger.param  # torch's hook methods carry no types
            wants = param.requires_grad
            param.requires_grad_(True)  # a hook on a frozen parameter is refused, though it may be thawed later
            self._handles.append(param.register_hook(weakly(ledger.on_gradient)))
            self._handles.append(param.register_post_accumulate_grad_hook(weakly(ledger.on_accumulated)))
            param.requires_grad_(wants)
        self._handles.append(root.register_forward_pre_hook(PassHook(self), with_kwargs=True))

    # ---- passes and graph tasks

    def on_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = batch_size((args, kwargs), told_axis(self.batch_dim, "")[0])
        if torch.compiler.is_compiling():
            self.batch = batch
            torch.ops.gradwire.begin(self.clock, self.key, UNKNOWN if batch is None else batch)
        else:
            self.begin(batch)

    def begin(self, batch: int | None) -> None:
        """A forward pass begins: its samples are others than those of the passes before."""
        self.passes += 1
        self.batch = batch
        if self.ran_backward:
            self._open.clear()
            self.ran_backward = False
        if torch.is_grad_enabled():
            self._open.append((self.passes, batch))
        if self._tasks and current_task() == -1:  # a backward raised: its callback never came
            for task in list(self._tasks):
                self._leave_task(task)

    @property
    def open_samples(self) -> int | None:
        """How many samples the backward now running has, as far as can be told."""
        batches = [batch for _, batch in self._open]
        return None if not batches or None in batches else sum(batch for batch in batches if batch is not None)

    def now(self) -> tuple[int, int | None, str | None]:
        """(pass, batch size, doubt) of a layer called now; a reentrant checkpoint calls it from inside backward."""
        if current_task() == -1 or not self._open:
            return self.passes, self.batch, None
        if len(self._open) > 1:
            doubt = "a reentrant checkpoint cannot tell which of several forward passes it recomputes"
            return self.passes, self.batch, f"{doubt}; use_reentrant=False can"
        return *self._open[0], None

    def enter_task(self) -> None:
        """Has what this backward stages dropped at its end: unless a gradient arrived, it did not count."""
        task = current_task()
        if task != -1 and task not in self._tasks:
            self._tasks.add(task)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._leave_task(task))

    def _leave_task(self, task: int) -> None:
        self._tasks.discard(task)
        self.ran_backward = True
        for ledger in self.ledgers.values():
            ledger.staged.pop(task, None)

    def signs(self, passed: int, batch: int) -> Tensor:
        """A random sign a sample, the same for all modules in one pass."""
        if passed not in self._signs:
            self._signs[passed] = torch.randint(0, 2, (batch,), generator=self._generator) * 2 - 1
            for old in list(self._signs)[:-REMEMBERED]:
                del self._signs[old]
        return self._signs[passed]

    # ---- what the adapter calls

    def bind(self, name: str, destination: Tensor) -> None:
        """The moment lives in `destination` (float32, 1-D) from now on; what was committed so far comes along."""
        self.ledgers[name].bind(destination)

    def seen(self, name: str) -> bool:
        """Whether a gradient arrived since the last consume."""
        return self.ledgers[name].arrived

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

    def remove(self) -> None:
        """Restores every forward and removes every hook; the moments stay readable."""
        for handle in self._handles:
            handle.remove()
        for module, tap in self._taps.items():
            uninstall(module, tap)
        for tap in self._broadcasts:
            unwatch_parameter(tap)
        self._handles.clear()
        self._taps.clear()
        RECORDERS.pop(self.key, None)
