"""`attach` and `Wire`: what a user holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradwire.adapters.ddp import attach_reducer
from gradwire.adapters.reducer import Reducer
from gradwire.adapters.step_log import logged
from gradwire.errors import GradwireError
from gradwire.exchange.counting import Stats, Writer
from gradwire.methods import BF16, VGC, Compressor, Dense, compressor_of
from gradwire.state import checkpoint

if TYPE_CHECKING:
    from gradwire.adapters.auto.method_chooser import MethodChooser
    from gradwire.moments import coverage
    from gradwire.moments.batch_dim import BatchDim
    from gradwire.plan.choose import Verdict

AUTO = "auto"


def attach(
    model: nn.Module,
    compressor: Compressor | str,
    *,
    methods: Sequence[Compressor | str] | None = None,
    scaler: Any = None,
    strict: bool = False,
    batch_dim: BatchDim = 0,
    estimator: str = "groups",
    exact: bool = True,
    same_samples: bool = True,
) -> Wire:
    """Makes a DistributedDataParallel model send compressed gradients. Collective: every rank calls it alike.

    A net that was attached before and is wrapped anew goes on with what was held back; its older wire ends.

    compressor: such as VGC(alpha=1.5) or its spec, "vgc:alpha=1.5"; or "auto": measures the link and the steps,
    chooses among Dense and `methods` (BF16 and VGC if nothing is said), says why, and anew when the link changes.
    scaler: the GradScaler, if one is used, so that the residual is kept in units of 1 whatever the scale does.
    strict: refuse parameters whose second moment can only be estimated.
    batch_dim: the axis of the samples in what the model is called on; from there they are followed through its layers
    (`wire.coverage()` says where that failed). {module name: axis} says it of a layer, None that it has none,
    "positions" of an Embedding that its ids are added to every sample alike.
    estimator: "groups", "signs" or "step", for parameters without an exact second moment; exact=False: for all.
    same_samples: forward passes of one backward with as many samples are of the same ones (a Siamese net's two), or of
    pairs; False: every pass has samples of its own. Passes of unequal numbers always have.
    """
    moments = {
        "batch_dim": batch_dim,
        "estimator": estimator,
        "exact": exact,
        "strict": strict,
        "same_samples": same_samples,
    }
    if compressor == AUTO:
        allowed = [compressor_of(one) for one in (methods if methods is not None else (BF16(), VGC()))]
        return _choosing(attach_reducer(model, Dense(), scaler, moments), allowed)
    if methods is not None:
        raise ValueError(f'attach: methods are what "auto" chooses from, and the compressor is {compressor!r}')
    return Wire(attach_reducer(model, compressor_of(compressor), scaler, moments))


def _choosing(reducer: Reducer, methods: Sequence[Compressor]) -> Wire:
    from gradwire.adapters.auto.method_chooser import MethodChooser  # not imported with gradwire: few need it

    try:
        return Wire(reducer, MethodChooser(reducer, methods))
    except BaseException:
        reducer.close()
        raise


class Wire:
    """The handle of an attached model."""

    def __init__(self, reducer: Reducer, chooser: MethodChooser | None = None) -> None:
        self._reducer, self._chooser = reducer, chooser

    def __repr__(self) -> str:
        reducer = self._reducer
        size = f"{reducer.n_parameters} parameters, {reducer.world_size} workers"
        return f"Wire({reducer.compressor!r}, {size}, step {reducer.steps})"

    @property
    def compressor(self) -> Compressor:
        return self._reducer.compressor

    @compressor.setter
    def compressor(self, compressor: Compressor | str) -> None:
        """Changes the method between two steps; the residual and the variance are carried over. Collective."""
        reducer, method = self._live(), compressor_of(compressor)
        if self._chooser is not None:
            self._chooser.stop()
            self._chooser = None
        reducer.use(method)

    @property
    def verdict(self) -> Verdict | None:
        """Of "auto": what it chose, from which predictions, and why; None until it has measured.

        local: what local steps would take, where even its best step waits for the link most of the time.
        """
        return None if self._chooser is None else self._chooser.verdict

    @property
    def steps(self) -> int:
        """Exchanges so far."""
        return self._reducer.steps

    def stats(self) -> Stats:
        """What this worker sent since `attach` or the last `reset_stats`."""
        return self._reducer.meter.stats(self._reducer.store.residuals())

    def reset_stats(self) -> None:
        """Starts the totals anew; the state of the compression is not touched."""
        self._reducer.meter.reset()

    def coverage(self) -> list[coverage.Row]:
        """Prints where the samples are and which parameter has which second moment, and returns the rows."""
        recorder = self._reducer.recorder
        if recorder is None:
            print(f"{self.compressor!r} needs no second moments")
            return []
        rows = recorder.coverage()
        from gradwire.moments import coverage  # there is a recorder, so it is loaded

        print(recorder.batch_axis.describe(recorder.batch))
        print(coverage.table(rows))
        return rows

    def log_to(self, writer: Writer, every: int = 10, prefix: str = "gradwire") -> None:
        """Writes the figures of `stats()` to anything with add_scalar, every so many steps."""
        reducer = self._live()
        reducer.on_step.append(logged(self.stats, writer, every, prefix, lambda: self.steps, lambda: self.steps))

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by parameter name; save it on every rank. Loads with weights_only=True."""
        return checkpoint.state_dict(self._reducer)

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Goes on where `state` was saved, on the same number of workers. Collective."""
        reducer = self._live()
        method = None if self._chooser is None else self._chooser.method_of(state)
        checkpoint.load_state_dict(reducer, state, strict=strict)
        if self._chooser is not None and method is not None:
            self._chooser.take_over(method)

    def capture(self, *sample: Tensor) -> None:
        """On a GPU: the model's forward and backward run as two CUDA graphs for inputs like the sample.

        For models of many small layers, where Python takes longer than the GPU. Other inputs and eval run as before.
        The gradients arrive together at the end of the backward, so nothing is sent while it runs.
        """
        reducer = self._live()
        if reducer.device.type != "cuda":
            raise GradwireError(f"capture makes CUDA graphs, and this model is on {reducer.device}")
        if reducer.recorder is None:
            raise GradwireError(
                f"{self.compressor!r} needs no second moments: torch.cuda.make_graphed_callables captures such a model"
            )
        from gradwire.moments.cuda_graphs.graphed_forward import GraphedForward

        GraphedForward(reducer.recorder, getattr(reducer.root, "module", reducer.root), sample)

    def release(self) -> None:
        """Undoes `capture`: for a model whose layers, hooks or frozen parameters change."""
        recorder = self._live().recorder
        if recorder is not None:
            recorder.release()

    def skip_step(self) -> None:
        """Call it when you leave out an optimizer step on purpose, after the backward."""
        self._live().skip_step()

    def detach(self) -> None:
        """Plain DDP again, after one more step that takes along what was held back. Collective."""
        reducer = self._live()
        if self._chooser is not None:
            self._chooser.stop()
        reducer.detach()

    def _live(self) -> Reducer:
        if not self._reducer.attached:
            raise GradwireError("this wire is detached, or a newer one has its net: attach the model again")
        return self._reducer
