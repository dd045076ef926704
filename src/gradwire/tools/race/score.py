"""What a race is run to: a test accuracy, or of text bits per byte, which shall come down."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.tools.input_errors import InputError

MOST_BITS = 8.0  # per byte, of who knows nothing


@dataclass(frozen=True)
class Score:
    """One of a task's scores."""

    name: str  # as the task has it
    words: str
    falls: bool  # lower is better

    def reached(self, value: float, target: float) -> bool:
        return value <= target if self.falls else value >= target

    def show(self, value: float) -> str:
        return f"{value:.3f}" if self.falls else f"{100 * value:.1f} %"

    def target(self, value: float) -> str:
        """With all its digits."""
        return f"{value:g} {self.words}" if self.falls else f"a {self.words} of {100 * value:g} %"

    def check(self, target: float) -> None:
        """Raise where nothing could reach it, or everything would."""
        if self.falls and not 0 < target < MOST_BITS:
            raise InputError(f"--target {target}: bits per byte between 0 and {MOST_BITS:g}, such as 2.5")
        if not self.falls and not 0 < target <= 1:
            raise InputError(f"--target {target}: an accuracy between 0 and 1, such as 0.97")


ACCURACY = Score("test_accuracy", "test accuracy", falls=False)
BITS_PER_BYTE = Score("bits_per_byte", "bits per byte", falls=True)


def score_of(task: str) -> Score:
    return BITS_PER_BYTE if task == "text" else ACCURACY
