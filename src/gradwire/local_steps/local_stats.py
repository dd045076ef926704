"""The figures of local steps, by round and by inner step."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codec.header import WORD_BYTES
from gradwire.exchange.counting import Stats
from gradwire.local_steps.recipe import Recipe

STATUS_BYTES = 12  # summed beside every exchange: who contributes, who finishes, whose statistics are finite


@dataclass(frozen=True)
class LocalStats(Stats):
    """What one worker sent; `steps` are inner steps, and dense_bytes what plain DDP would have sent in them.

    Milliseconds are of a round, delay is in inner steps.
    """

    rounds: int  # in which every fragment has been exchanged
    exchanges: int  # a round has one a fragment
    bytes_a_round: float
    bytes_a_step: float
    waited_ms: float = 0.0  # a round, in which the training stood still for the exchange
    lost_rounds: int = 0  # to which this worker contributed nothing, because its weights were not finite

    @classmethod
    def of(
        cls, total: Stats, recipe: Recipe, n_parameters: int, steps: int, waited_ms: float = 0.0, lost: int = 0
    ) -> LocalStats:
        """total: of all exchanges; waited_ms: in all of them."""
        exchanges, fragments, sent = total.steps, recipe.fragments, sum(total.elements_sent.values())
        share = fragments / max(1, exchanges)  # of a round
        figures = {
            "steps": steps,
            "dense_bytes": WORD_BYTES * n_parameters * steps,
            "ratio": n_parameters * steps / sent if sent else float("inf") if steps else 0.0,
            "bits_per_parameter": 8 * total.bytes_sent / (max(1, steps) * n_parameters),
            "delay": total.delay * recipe.every / fragments,
            "encode_ms": total.encode_ms * fragments,
            "exchange_ms": total.exchange_ms * fragments,
            "decode_ms": total.decode_ms * fragments,
            "rounds": exchanges // fragments,
            "exchanges": exchanges,
            "bytes_a_round": total.bytes_sent * share,
            "bytes_a_step": total.bytes_sent / max(1, steps),
            "waited_ms": waited_ms * share,
            "lost_rounds": lost,
        }
        return cls(**{**vars(total), **figures})

    def __str__(self) -> str:
        if not self.steps:
            return "nothing sent yet"
        fewer = self.dense_bytes / self.bytes_sent if self.bytes_sent else float("inf")
        return (
            f"{self.steps} inner steps in {self.rounds} rounds: {self.bytes_sent / 1e6:.3f} MB sent ({fewer:.1f}x less "
            f"than a gradient each step), {self.bytes_a_round / 1e3:.1f} kB a round; a round encodes "
            f"{self.encode_ms:.2f} ms, exchanges {self.exchange_ms:.2f} ms, decodes {self.decode_ms:.2f} ms, and the "
            f"training waited {self.waited_ms:.2f} ms; error feedback {self.residual_norm:.3g}"
        )
