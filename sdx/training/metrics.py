"""What a training measured, as JSON lines: one object per logged step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np


class MetricsLog:
    """Lines {"step", "seconds", "loss", "factor", ...evaluation} in `path`, written by the first
    process; None writes nothing. `losses` holds all phases' where there are several."""

    def __init__(self, path: Path | None):
        self.path = path if jax.process_index() == 0 else None

    def write(self, now: Any, losses: np.ndarray, factor: float, evaluation: dict) -> None:
        """Adds the line of a step."""
        if self.path is None:
            return
        line = {
            "step": now.step,
            "seconds": round(now.seconds, 3),
            "loss": float(losses[0]),
            "factor": factor,
        }
        if len(losses) > 1:
            line["losses"] = losses.tolist()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **evaluation}) + "\n")

    def rewind(self, step: int) -> None:
        """Drops the lines after `step` (and one that a kill cut short): they will come again."""
        if self.path is None or not self.path.exists():
            return
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(partial, self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that is not whole is left out."""
    lines = []
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
