"""What the user sees while something goes on: bars on a terminal, elsewhere lines or nothing."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bars(Progress):
    """A bar a task: how many of how many, its last figures, the time left. None where there is no terminal."""

    def __init__(self, hidden: bool = False, stderr: bool = False, transient: bool = False) -> None:
        console = Console(stderr=stderr)
        columns = TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn()
        state, left = TextColumn("{task.fields[state]}"), TimeRemainingColumn()
        hidden = hidden or not console.is_terminal
        super().__init__(*columns, state, left, console=console, transient=transient, disable=hidden)

    def begin(self, what: str, total: int | None, done: int = 0) -> TaskID:
        return self.add_task(what, total=total, completed=done, state="")

    def line(self, text: str) -> None:
        """A line that stays, above the bars or without them."""
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def show(score: str, value: float) -> str:
    """A score for people: accuracies in percent."""
    if score.endswith("accuracy"):
        return f"{score.replace('_', ' ')} {100 * value:.2f} %"
    return f"{score.replace('_', ' ')} {value:.4f}"
