"""The cost model: how long a step takes, from the link, the model's own times and what a method costs.

W workers, S bytes of a bucket that one worker hands over, all on a ring: an all-reduce brings 2 (W-1)/W S over every
link in 2 (W-1) hops, an all-gather (W-1) S in W-1 hops. What overlaps and what does not is in `predict`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from gradwire.local_steps.local_stats import STATUS_BYTES
from gradwire.plan.rounds import Exchange, RoundCost, round_times

FLOAT_BYTES = 4
NS_PER_MS = 1e6


@dataclass(frozen=True)
class Network:
    """The links between the workers; every worker has one of this rate, in each direction."""

    workers: int
    mbit: float  # Mbit/s of TCP's payload; math.inf: no limit
    latency_ms: float  # of one hop of a ring: a small collective takes W - 1 of it (gather) or 2 (W - 1) (sum)
    # What collectives of some sizes took, by a probe: (bytes on the link, of all-reduces, of all-gathers), as a share
    # of what the two numbers above come to. Between them it is interpolated.
    curve: tuple[tuple[float, float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"a network has at least 1 worker, not {self.workers}")
        if not self.mbit > 0:
            raise ValueError(f"a link's rate must be more than 0 Mbit/s, not {self.mbit}")
        if not 0 <= self.latency_ms < math.inf:
            raise ValueError(f"a link's latency must be 0 ms or more, not {self.latency_ms}")

    def transfer_ms(self, n_bytes: float) -> float:
        """How long so many bytes keep a link busy."""
        return n_bytes * 8 / self.mbit / 1e3

    def collective_ms(self, n_bytes: float, gather: bool) -> float:
        """One collective that brings so many bytes over every link; beyond the largest measured it keeps its pace."""
        if self.curve and n_bytes > (largest := self.curve[-1][0]):
            return self.collective_ms(largest, gather) + self.transfer_ms(n_bytes - largest) * self._pace(gather)
        return (self.transfer_ms(n_bytes) + self.hops_ms(gather)) * self._share(n_bytes, gather)

    def _pace(self, gather: bool) -> float:
        """What more bytes take, as a share of what `mbit` says: as between the two largest that were measured."""
        if len(self.curve) < 2:
            return 1.0
        smaller, largest = (point[0] for point in self.curve[-2:])
        plain_ms = self.transfer_ms(largest - smaller)
        more_ms = self.collective_ms(largest, gather) - self.collective_ms(smaller, gather)
        return max(0.5, more_ms / plain_ms) if plain_ms else 1.0

    def _share(self, n_bytes: float, gather: bool) -> float:
        """Straight lines between the points of the curve, all on a logarithmic scale; level beyond its ends."""
        if not self.curve or n_bytes <= 0:
            return 1.0
        sizes, sums, gathers = np.log(self.curve).T
        return math.exp(np.interp(math.log(n_bytes), sizes, gathers if gather else sums))

    def on_link(self, n_bytes: float, gather: bool) -> float:
        """Bytes that pass each link when every worker hands so many to one collective."""
        return (self.workers - 1) * n_bytes * (1.0 if gather else 2 / self.workers)

    def hops_ms(self, gather: bool) -> float:
        """What one collective takes beside its bytes."""
        return (self.workers - 1) * self.latency_ms * (1 if gather else 2)


@dataclass(frozen=True)
class Work:
    """A step without any exchange."""

    buckets: tuple[int, ...]  # elements, in the order in which they become ready
    forward_ms: float  # everything before the backward: data, forward
    backward_ms: float  # plain, without second moments
    after_ms: float  # optimizer and whatever follows
    ready: tuple[float, ...] = ()  # when each bucket is ready, as a share of the backward; (): evenly by elements
    beside: float = 1.0  # the share of the courier's work that costs the backward nothing; 0: it takes the same cores

    @property
    def numel(self) -> int:
        return sum(self.buckets)

    @property
    def compute_ms(self) -> float:
        """A step of one worker alone."""
        return self.forward_ms + self.backward_ms + self.after_ms

    def shares(self) -> tuple[float, ...]:
        """When each bucket is ready, as a share of the backward."""
        return self.ready or tuple(done / self.numel for done in accumulate(self.buckets))


@dataclass(frozen=True)
class Cost:
    """Of one method on this machine, for this model."""

    spec: str
    kind: str  # "sum" (one all-reduce), "gather" (all-gather of messages), "rounds" (several sums)
    bytes_per_element: float  # that one worker hands to the collective(s), mean of a step, padding included
    head_bytes: float  # a bucket
    encode_ns: float  # an element
    decode_ns: float  # an element, whatever W is
    decode_message_ns: float  # an element of the gradient and message: times W (for "gather")
    overhead_ms: float  # a bucket: Python, launches, hand-over to the courier
    moments: float  # factor on forward + backward where second moments are made, 1.0 where not
    rounds: int = 1  # collectives a bucket, one after another
    room: bool = False  # its messages never take longer than an all-reduce of float32: see exchange/room.py
    guess: bool = False  # nobody has measured this method: its times are those of a usual one
    local: RoundCost | None = (
        None  # it is exchanged once in so many steps, fragment by fragment in the place of buckets
    )

    @property
    def is_cast(self) -> bool:
        """Whether every gradient is summed whole, if in a smaller precision; all other methods change the training."""
        return self.kind == "sum" and self.local is None

    def handed_over(self, numel: float) -> float:
        """Bytes of one bucket that one worker gives to its collectives."""
        return self.bytes_per_element * numel + self.head_bytes

    def parts(self, work: Work) -> tuple[float, ...]:
        """Elements that are exchanged together: DDP's buckets, or the fragments of local steps."""
        if self.local is None:
            return work.buckets
        return (work.numel / self.local.fragments,) * self.local.fragments

    def bytes_a_step(self, work: Work) -> float:
        """That one worker gives to its collectives; of local steps on average."""
        n_bytes = sum(self.handed_over(numel) for numel in self.parts(work))
        if self.local is None:
            return n_bytes
        return (n_bytes + STATUS_BYTES * self.local.fragments) / self.local.every

    def encode_ms(self, work: Work) -> float:
        """Of an exchange of all elements, with all that belongs to its parts."""
        return self.overhead_ms * len(self.parts(work)) + self.encode_ns * work.numel / NS_PER_MS

    def decode_ms(self, work: Work, n_messages: int) -> float:
        """Of an exchange of all elements; so many messages are gathered, where they are."""
        messages_ns = self.decode_message_ns * n_messages if self.kind == "gather" else 0.0
        return (self.decode_ns + messages_ns) * work.numel / NS_PER_MS


@dataclass(frozen=True)
class Prediction:
    """Of one step; of local steps an inner step on average."""

    step_ms: float
    exchange_ms: float  # first bucket ready to last future
    wire_ms: float  # the link is busy
    bytes_on_link: float  # a worker's, up, a step
    waiting_ms: float = 0.0  # the training stands still, because something is on its way
    round_ms: float | None = None  # of local steps: `every` inner steps with all that belongs to them

    @property
    def waiting(self) -> float:
        """The share of the time in which the training stands still."""
        return self.waiting_ms / self.step_ms if self.step_ms else 0.0


@dataclass(frozen=True)
class Piece:
    """What one bucket costs: work before and after its collectives, and the link between them."""

    before_ms: float
    after_ms: float
    link_ms: float  # until the next collective may begin: eight tiny sums at once take Gloo eight times as long as one
    n_bytes: float  # on the link


def piece_of(numel: float, network: Network, cost: Cost) -> Piece:
    """One bucket of so many elements."""
    gather = cost.kind == "gather"
    n_bytes = network.on_link(cost.handed_over(numel), gather)
    part = 1.0  # of what the method would send: the rest waits in its residual, or all of it goes as a dense step
    if cost.room and gather and cost.handed_over(numel) > 0:  # as exchange/room.py has it, for one worker alone too
        part = min(1.0, 2 * FLOAT_BYTES * numel / (network.workers * cost.handed_over(numel)))
    n_bytes *= part
    link_ms = cost.rounds * network.collective_ms(n_bytes / cost.rounds, gather)
    link_ms += network.hops_ms(False) if part < 1 else 0.0  # of the sum of a dense step
    decode_ns = cost.decode_ns + (cost.decode_message_ns * network.workers * part if gather else 0.0)
    return Piece(
        before_ms=cost.overhead_ms + cost.encode_ns * numel / NS_PER_MS,
        after_ms=decode_ns * numel / NS_PER_MS,
        link_ms=link_ms,
        n_bytes=n_bytes,
    )


def predict(work: Work, network: Network, cost: Cost) -> Prediction:
    """One step, event by event: the backward makes buckets ready, and each is encoded, carried and decoded.

    - A bucket is ready at its share of the backward. Second moments make forward and backward longer.
    - One link carries the collectives one after another, in order.
    - "gather", "rounds": the courier, one thread, encodes a ready bucket before it waits for one that was sent.
      The part of its work that is not `beside` the backward holds the backward up.
    - "sum": encoding is work of the backward's own thread, and the courier is not used.
    - All futures resolve together; then comes what is after the backward.
    - Local steps have rounds (rounds.py) in the place of all that.
    """
    if cost.local is not None:
        return _local(work, network, cost, cost.local)
    kinds = {numel: piece_of(numel, network, cost) for numel in set(work.buckets)}
    pieces = [kinds[numel] for numel in work.buckets]
    begin, backward_ms = work.forward_ms * cost.moments, work.backward_ms * cost.moments
    backward = _Backward([begin + share * backward_ms for share in work.shares()], begin + backward_ms)
    first = backward.ready[0]
    if cost.kind == "sum":
        last = _summed(pieces, backward)
    else:
        last = _carried(pieces, backward, cost.kind == "gather", 1 - work.beside)
    return Prediction(
        step_ms=max(backward.end, last) + work.after_ms,
        exchange_ms=last - first,
        wire_ms=sum(piece.link_ms for piece in pieces),
        bytes_on_link=sum(piece.n_bytes for piece in pieces),
        waiting_ms=max(0.0, last - backward.end),
    )


def _local(work: Work, network: Network, cost: Cost, local: RoundCost) -> Prediction:
    """Every fragment is one piece, with the small sum of its status behind it on the link, beside a decode of messages.

    The workers do not meet inside a round, so nothing but the round's exchanges can hold up an inner step.
    """
    numel = work.numel / local.fragments
    piece = piece_of(numel, network, cost)
    status_bytes = network.on_link(STATUS_BYTES, False)
    status_ms = network.collective_ms(status_bytes, False)
    last_ms = max(piece.after_ms, status_ms) if cost.kind == "gather" else piece.after_ms + status_ms
    exchange = Exchange(
        begin_ms=local.begin_ns * numel / NS_PER_MS,
        carried_ms=piece.before_ms + piece.link_ms + last_ms,
        slowed_ms=(1 - work.beside) * (piece.before_ms + piece.after_ms),
        end_ms=local.end_ns * numel / NS_PER_MS,
    )
    round_ms, waiting_ms = round_times(local, work.compute_ms, exchange)
    a_step = local.fragments / local.every  # exchanges
    return Prediction(
        step_ms=round_ms / local.every,
        exchange_ms=a_step * exchange.carried_ms,
        wire_ms=a_step * (piece.link_ms + status_ms),
        bytes_on_link=a_step * (piece.n_bytes + status_bytes),
        waiting_ms=waiting_ms / local.every,
        round_ms=round_ms,
    )


@dataclass
class _Backward:
    """When its buckets are ready and when it ends; other work on its cores moves all that is still to come."""

    ready: list[float]
    end: float

    def hold_up(self, since: float, by: float) -> None:
        if by == 0:
            return
        self.ready = [at + by if at > since else at for at in self.ready]
        self.end += by if self.end > since else 0.0


def _summed(pieces: list[Piece], backward: _Backward) -> float:
    """When the last sum is there. The collective's own thread does what is done with it."""
    held_up = free = last = 0.0
    for piece, ready in zip(pieces, backward.ready, strict=True):
        held_up += piece.before_ms
        free = max(free, ready + held_up) + piece.link_ms
        last = max(last, free + piece.after_ms)
    backward.end += held_up
    return last


def _carried(pieces: list[Piece], backward: _Backward, gather: bool, taken: float) -> float:
    """When the courier has decoded the last bucket. Its queue holds buckets to send and buckets to receive.

    taken: the share of its work that the backward loses.
    """
    now = free = 0.0
    sent: list[tuple[float, float]] = []  # (put into the queue at, arrives at)
    received = 0
    while received < len(pieces):
        number = len(sent)
        queued = sent[received][0] if received < number else math.inf
        if number < len(pieces) and backward.ready[number] <= queued:
            start = max(now, backward.ready[number])
            backward.hold_up(start, taken * pieces[number].before_ms)
            now = start + pieces[number].before_ms
            free = max(free, now) + pieces[number].link_ms
            # the sums of a bucket run from beginning to end, as if they had stood in the queue before all others
            sent.append((now if gather else -math.inf, free))
            continue
        start = max(now, sent[received][1])
        backward.hold_up(start, taken * pieces[received].after_ms)
        now = start + pieces[received].after_ms
        received += 1
    return now
