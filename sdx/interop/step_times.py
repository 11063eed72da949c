"""A sweep of measured step times (CSV) -> StepTable.

The file has a header and the columns batch, tokens (new tokens per sequence in one pass), context,
seconds, in any order, further columns ignored; one line per measurement. Repeated measurements of
one step are reduced to their median. Every combination of the batches, tokens and contexts that
occur must be there: a hole would be invented by interpolation.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from sdx.theory.hardware import StepTable, step_table

COLUMNS = ("batch", "tokens", "context", "seconds")


def read_step_times(path: str | Path, model: str = "", name: str = "") -> StepTable:
    """The table of one model's measured steps.

    model: whose steps they are; name: of the machine. Raises FileNotFoundError or ValueError, one
    line: a missing column, a value that is no number, seconds <= 0, a hole in the grid.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; columns {', '.join(COLUMNS)}")
    samples: dict[tuple[float, ...], list[float]] = defaultdict(list)
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path}: no column {missing[0]!r}: the header names {', '.join(COLUMNS)}"
            )
        for row in reader:
            *step, seconds = _numbers(path, reader.line_num, row)
            samples[tuple(step)].append(seconds)
    if not samples:
        raise ValueError(f"{path}: no measurements below the header")
    grids = [sorted({step[axis] for step in samples}) for axis in range(3)]
    for batch, tokens, context in itertools.product(*grids):
        if (batch, tokens, context) not in samples:
            raise ValueError(
                f"{path}: no measurement of batch {batch:g}, tokens {tokens:g}, context "
                f"{context:g}: measure every combination of the grid"
            )
    medians = [np.median(samples[step]) for step in itertools.product(*grids)]
    return step_table(*grids, np.reshape(medians, [len(g) for g in grids]), model, name)


def _numbers(path: Path, line: int, row: dict[str, str]) -> list[float]:
    values = []
    for column in COLUMNS:
        try:
            value = float(row[column])
        except (TypeError, ValueError):
            value = math.nan
        least = 0.0 if column == "context" else 1.0 if column != "seconds" else math.ulp(0.0)
        if not least <= value < math.inf:
            raise ValueError(f"{path}, line {line}: {column} is {row[column]!r}")
        values.append(value)
    return values
