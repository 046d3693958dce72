"""In place of a progress bar: keeps what is reported, as the bar writes it."""

from __future__ import annotations


class Reported(list[str]):
    """Reports of progress, in their order."""

    def say(self, activity: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        self.append(f"{activity}: {done} of {total} {unit}" if total else activity)
