"""What all commands share: their shape, lists of numbers, JSON files."""

from __future__ import annotations

import dataclasses
import json as json_module
import math
from pathlib import Path
from typing import Any

Outcome = tuple[dict[str, Any], list[str]]


def numbers(text: str, name: str, least: float = 1.0) -> list[float]:
    """ "1,8,32" or "1-9" -> [1, 8, 32], [1, 2, ..., 9]; every one finite and >= least."""
    values = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            if dash and low:
                values += [float(v) for v in range(int(low), int(high) + 1)]
            else:
                values.append(float(part))
        except ValueError:
            raise ValueError(
                f"{name} {text!r}: {part!r} is not a number; write a list like 1,8,32 or 1-9"
            ) from None
    for value in values:
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} {value:g} must be at least {least:g}")
    if not values:
        raise ValueError(f"{name} {text!r} is an empty range; write it upwards, like 1-9")
    return values


def read_json(path: str | Path) -> Any:
    try:
        return json_module.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); mend the file") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What all commands share."""

    json: str = ""
    """Write the result as JSON to this file, or to standard output (-)."""

    def run(self) -> Outcome:
        raise NotImplementedError
