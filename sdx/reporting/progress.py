"""Long work that says how far it is: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_SECONDS = 10.0  # between two lines of the same stage in a pipe


class Reporter:
    """Opens stages; `console` is where they show (standard error, so that results can be piped)."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(file=sys.stderr)

    @contextlib.contextmanager
    def stage(self, title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
        """Yields `report(message)`, to be called once per finished piece of `total`."""
        begun = time.perf_counter()
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}" + (f"/{total}" if total else "")),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.fields[note]}"),
            )
            with Progress(*columns, console=self.console, transient=True) as bar:
                task = bar.add_task(title, total=total, note="")
                yield lambda note="": bar.update(task, advance=1, note=note)
        else:
            yield self._lines(title, total, begun)
        self.console.print(f"{title}: {time.perf_counter() - begun:.1f} s", highlight=False)

    def _lines(self, title: str, total: int | None, begun: float) -> Callable[[str], None]:
        self.console.print(f"{title} ...", highlight=False)
        done, last = 0, begun

        def report(note: str = "") -> None:
            nonlocal done, last
            done += 1
            if time.perf_counter() - last > QUIET_SECONDS:
                last = time.perf_counter()
                of = f"/{total}" if total else ""
                self.console.print(f"  {title}: {done}{of} {note}".rstrip(), highlight=False)

        return report
