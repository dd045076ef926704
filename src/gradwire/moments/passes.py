"""Step 1, moments: which forward passes of a model may still be differentiated, and which backward runs now."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradwire.moments.batch_axis import BatchAxis
    from gradwire.moments.cuda_graphs.captured_moments import CapturedMoments
    from gradwire.moments.follow.fake_forward import FakeForward

current_task: Callable[[], int] = torch._C._current_graph_task_id  # the backward now running, -1 outside of one
REMEMBERED = 64  # passes that may still be differentiated: validation without no_grad brings any number
SEVERAL = "a reentrant checkpoint cannot tell which of several forward passes it recomputes; use_reentrant=False can"
UNKNOWN = -1  # a batch size that is None
TELLS_EXPORT = torch.__version__ >= "2.12"  # before, is_exporting() is true in every compiled graph
NOTHING = nullcontext()
PASSES: weakref.WeakValueDictionary[int, ModelPasses] = weakref.WeakValueDictionary()  # by key, for compiled graphs
_keys = itertools.count(1)


def quietly(device: torch.device) -> AbstractContextManager[object]:
    """Without gradients and autocast. Both are off already in nearly every backward, and switching takes 15 us."""
    if not torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type):
        return NOTHING
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def arrives(node: Any, by_name: bool = True) -> bool:
    """Whether the backward now running will come to this node; by_name: what to say of one that it was asked for.

    torch's own question, though private: without it a gradient is made and thrown away.
    """
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it will not say of a parameter that autograd.grad was asked for by name
        return by_name


def transformed() -> bool:
    """Inside torch.func, a tracer or an exporter: there is no backward of ours to see."""
    if torch.compiler.is_compiling():
        return TELLS_EXPORT and torch.compiler.is_exporting()
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()


class Pass(NamedTuple):
    """One forward pass of the root; tokens: T where it was called on token ids [B, T]."""

    number: int
    batch: int | None
    tokens: int | None = None
    doubt: str | None = None


def clock_of(number: int, batch: int | None) -> Tensor:
    """A pass as a compiled graph carries it. Never an inference tensor: after a validation no graph would fit it."""
    with torch.inference_mode(False):
        return torch.tensor([number, UNKNOWN if batch is None else batch], device="cpu")  # to be read without waiting


class ModelPasses:
    """The passes and backwards of one model. Every account and every tap is given it when it is made.

    root_axis: of the samples in what the model is called on; batch_axis: where they lie in its layers.
    """

    def __init__(self, batch_axis: BatchAxis, root_axis: int | None, same_samples: bool) -> None:
        self.batch_axis, self.root_axis = batch_axis, root_axis
        self.same_samples = same_samples  # of passes in one backward with as many of them
        self.batch: int | None = None
        self.tokens: int | None = None
        self.current = Pass(0, None)
        self.step, self._backwards = 0, 0
        self.ran_backward = False
        self.following: FakeForward | None = None  # while the model runs without values
        self.capturing: CapturedMoments | None = None  # takes all uses while a graph is captured
        # parameters whose signed gradient is being taken, in a nested backward
        self.paused: frozenset[str] = frozenset()
        self.reports: list[dict[int, Any]] = []  # of every account, by backward: dropped when that is over
        self.tasks: set[int] = set()
        self._open: deque[Pass] = deque(maxlen=REMEMBERED)
        self._reached: dict[int, Pass] = {}
        self._reached_in = -1
        self.key = next(_keys)
        self.clock = clock_of(0, None)  # the pass now running, for compiled graphs
        PASSES[self.key] = self

    # ---- forward

    def begin(self, batch: int | None, tokens: int | None = None) -> None:
        """A forward pass begins."""
        self.batch, self.tokens = batch, tokens
        self.current = Pass(self.current.number + 1, batch, tokens)
        self.clock = clock_of(self.current.number, batch)
        if self.ran_backward:
            self._open.clear()
            self.ran_backward = False
        if torch.is_grad_enabled():
            self._open.append(self.current)
        if self.tasks and current_task() == -1:  # a backward raised: its callback never came
            for task in list(self.tasks):
                self._leave_task(task)

    @property
    def alone(self) -> bool:
        """Whether the pass now beginning is the only one that may be differentiated."""
        return len(self._open) == 1

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

    # ---- backward

    def output_hook(self) -> Callable[[Tensor], None]:
        """For what the pass now running puts out. Keeps nothing alive: the graph may outlive the model."""
        found, passed = weakref.ref(self), self.current

        def reached(gradient: Tensor) -> None:
            alive = found()
            if alive is not None:
                alive.reach(passed)

        return reached

    def reach(self, passed: Pass) -> None:
        """The backward now running goes through this pass."""
        task = current_task()
        self.enter_task()
        if self._reached_in != task:
            self._reached, self._reached_in = {}, task
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

    def enter_task(self) -> None:
        """Has what this backward reports dropped at its end: unless a gradient arrived, it did not count."""
        task = current_task()
        if task != -1 and task not in self.tasks:
            self._backwards += not self.tasks  # one inside another is a part of it
            self.tasks.add(task)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._leave_task(task))

    def _leave_task(self, task: int) -> None:
        self.tasks.discard(task)
        if task == self._reached_in:
            self._reached, self._reached_in = {}, -1
        self.ran_backward = True
        if self.capturing is not None:
            self.capturing.finish()
        for reported in self.reports:
            reported.pop(task, None)

    # ---- random signs

    def begin_step(self, step: int) -> None:
        """Signs follow from (step, n-th backward in it), so that a resumed run agrees."""
        self.step, self._backwards = step, 0

    @property
    def seed(self) -> int:
        """Of the random signs in the backward now running."""
        digest = blake2b(f"{self.step} {self._backwards}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
