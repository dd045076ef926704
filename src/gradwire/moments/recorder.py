"""Step 1, moments: the recorder of a model: an account for every parameter, a tap on every layer that uses one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.errors import AttachError, MomentError
from gradwire.layout import in_shape
from gradwire.moments import owners
from gradwire.moments.account import Account, Options
from gradwire.moments.batch_axis import BatchAxis, batch_size, tensors_in, token_count
from gradwire.moments.batch_dim import BatchDim, axis_of, check_batch_dim, root_axis_of, told_axis
from gradwire.moments.coverage import Row
from gradwire.moments.hooks import Hook
from gradwire.moments.layer_call import Tap, path_of
from gradwire.moments.layers.broadcast import unwatch_parameter, watch_parameter
from gradwire.moments.layers.own_parameters import OWN
from gradwire.moments.micro_batches import ESTIMATORS
from gradwire.moments.owners import Owner
from gradwire.moments.passes import UNKNOWN, ModelPasses, transformed
from gradwire.moments.random_signs import watch_signed
from gradwire.moments.swapped_forward import ATTRIBUTE, install, is_free, uninstall

if TYPE_CHECKING:
    from gradwire.moments.cuda_graphs.graphed_forward import GraphedForward


# by the key of their passes; what a module's tap needs to find the recorder of a model that is gone
RECORDERS: weakref.WeakValueDictionary[int, Recorder] = weakref.WeakValueDictionary()


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
        modules = {name: module for name, module, _ in owners.modules_of(root)}
        check_batch_dim(batch_dim, modules)
        self._refuse_second(modules)
        self.root = weakref.ref(root)  # whose hooks hold this recorder
        self.batch_dim, self.exact, self.options = batch_dim, exact, Options(estimator, strict)
        root_axis = root_axis_of(batch_dim, root)
        self.batch_axis = BatchAxis(root_axis) if batch_axis is None else batch_axis
        self.passes = ModelPasses(self.batch_axis, root_axis, same_samples)
        self.graphs: list[GraphedForward] = []
        self._handles: list[RemovableHandle] = []
        self._taps: dict[nn.Module, Tap] = {}
        self._broadcasts: list[Tap] = []
        self.accounts: dict[str, Account] = {}
        self.listening = False
        RECORDERS[self.passes.key] = self
        try:
            self._open_accounts(root, names)
            self._install(root)
        except BaseException:
            self.remove()  # a recorder that failed leaves no trace
            raise

    # ---- setting up

    @staticmethod
    def _refuse_second(modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            tap = module.__dict__.get(ATTRIBUTE)
            recorder = RECORDERS.get(tap.passes.key) if tap and tap.live else None
            if recorder is not None and recorder.root() is None:
                recorder.remove()  # of a model that is gone: a notebook's cell puts the same layers into a new net
            if tap and tap.live:
                raise AttachError(
                    f"{name!r} ({type(module).__name__}) is being recorded already, for another model that shares it: "
                    "del it if nothing trains it any more; wire.detach() it and train it one step more; or give one of "
                    "the two a method without second moments, such as gradwire.TopK()"
                )

    def _open_accounts(self, root: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
        holders = owners.owners_of(root)
        for name, param in names.items():
            held = holders.get(id(param), [])
            never = next((why for owner in held if (why := owners.why_never(owner))), None)
            never = never if self.exact else "exact=False"
            raw = next((why for owner in held if (why := owners.why_raw(owner))), None)
            if never and self.options.strict:
                raise MomentError(
                    f"strict=True wants exact moments, but that of {name!r} (shape {tuple(param.shape)}) "
                    f"can only be estimated: {never}. Replace the layer, or attach with strict=False"
                )
            raw = raw if held else owners.UNKNOWN.format(kind="module unknown")
            hint = raw or owners.NOT_REPORTED.format(kind=path_of(type(held[0].module)))
            account = self.accounts[name] = Account(name, param, self.passes, self.options, never, hint)
            account.shared, account.estimated = len(held) > 1, bool(never or raw)
        for account in self.accounts.values():
            self._watch(account, holders.get(id(account.param), []))

    def _watch(self, account: Account, held: list[Owner]) -> None:
        """Decides which taps bring this parameter's uses."""
        for owner in held:
            layer = owner.layer
            if not is_free(owner.module):
                continue
            known = account.never is None and layer is not None
            if known:
                self._tap(owner).accounts[owner.local] = account
            if self.options.estimator == "signs" and (not known or layer is OWN):
                tap = self._tap(owner)
                tap.signed[account.name], tap.after = account, watch_signed
        name, lineage = (held[0].name, held[0].lineage) if held else ("", ())
        self._broadcasts.append(watch_parameter(account, axis_of(self.batch_dim, name, None, lineage)[0]))

    def _tap(self, owner: Owner) -> Tap:
        tap = self._taps.get(owner.module)
        if tap is None:
            axis, named = axis_of(self.batch_dim, owner.name, owner.layer, owner.lineage)
            tap = self._taps[owner.module] = Tap(owner.module, owner.layer, axis, {}, self.passes, owner.name, named)
            if told_axis(self.batch_dim, owner.name)[0] == "positions":
                # which get their batch axis where the model's own is
                tap.positions, tap.axis = True, self.passes.root_axis
        return tap

    def _install(self, root: nn.Module) -> None:
        for module, tap in self._taps.items():
            install(module, tap)
        self.listen()
        self._handles.append(root.register_forward_pre_hook(Hook(self.on_forward), with_kwargs=True))
        self._handles.append(root.register_forward_hook(Hook(self.on_output)))

    def listen(self) -> None:
        """Every account hears of its gradients from now on."""
        if not self.listening:
            self.listening = True
            for account in self.accounts.values():
                account.listen()

    def ignore(self) -> None:
        """Without hooks on parameters: the graph of the pass now beginning commits by itself."""
        self.listening = False
        for account in self.accounts.values():
            account.ignore()

    # ---- forward and backward

    @property
    def batch(self) -> int | None:
        """How many samples the last pass had."""
        return self.passes.batch

    def on_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passes = self.passes
        batch = batch_size((args, kwargs), passes.root_axis)
        tokens = token_count((args, kwargs)) if passes.root_axis == 0 else None
        if torch.compiler.is_compiling():
            passes.batch, passes.tokens = batch, tokens
            known = [UNKNOWN if size is None else size for size in (batch, tokens)]
            passes.clock = torch.ops.gradwire.begin(passes.clock, passes.key, *known)
        else:
            passes.begin(batch, tokens)
            if torch.is_grad_enabled() and not transformed() and self.batch_axis.is_new(root, args, kwargs, batch):
                from gradwire.moments.follow.fake_forward import follow  # it takes half a second to import

                self.batch_axis.learn(lambda axis: follow(passes, root, args, kwargs, axis))

    def on_output(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Has the passes told when a backward reaches this one."""
        if torch.compiler.is_compiling() or transformed() or not torch.is_grad_enabled():
            return
        reached = self.passes.output_hook()
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

    # ---- what the adapter calls

    def bind(self, name: str, destination: Tensor) -> None:
        """The moment lives in `destination` (float32, 1-D) from now on; what was committed so far comes along."""
        self.accounts[name].bind(destination)

    def consume(self, name: str, grad: Tensor) -> bool:
        """Completes an estimated moment from the accumulated gradient (1-D); whether one came since the last time."""
        return self.accounts[name].consume(grad)

    def moment(self, name: str) -> Tensor:
        """The moment as it stands, in the parameter's shape; estimated ones are complete after consume."""
        account = self.accounts[name]
        return in_shape(account.moment, account.param)

    def coverage(self) -> list[Row]:
        """One row a parameter: exact or estimated, and why."""
        return [account.row() for account in self.accounts.values()]

    def release(self) -> None:
        """Forwards without graphs again."""
        for graph in self.graphs:
            graph.release()
        self.graphs.clear()

    def remove(self) -> None:
        """Restores every forward and removes every hook; the moments stay readable."""
        self.release()
        self.ignore()
        RECORDERS.pop(self.passes.key, None)
        for handle in self._handles:
            handle.remove()
        for module, tap in self._taps.items():
            uninstall(module, tap)
        for tap in self._broadcasts:
            unwatch_parameter(tap)
        self._handles.clear()
        self._taps.clear()
        self._broadcasts.clear()
