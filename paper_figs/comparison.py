"""paper | ours | difference: the cells of one table, how each was judged, and their CSV.

A cell is
  reproduced  sdx computed it from inputs that do not contain it, within the stated tolerance;
  predicted   a fit on other cells gives it (held out);
  explained   a fit that has seen it gives it, or its difference has a stated cause;
  neither     outside the tolerance without a known cause.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from paper_figs.style import OUT

DATA = Path(__file__).parent / "data"
STATUSES = ("reproduced", "predicted", "explained", "neither")


def read(name: str) -> list[dict[str, str]]:
    """Rows of paper_figs/data/`name`, values as printed in the paper."""
    with open(DATA / name, encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def as_numpy(tree):
    """Leaves of a result as NumPy arrays: JAX would cast float64 down when one is indexed here."""
    return jax.tree.map(np.asarray, tree)


def tokens(text: str) -> float:
    """Training tokens as the papers print them: "2.4T", "180B"."""
    return float(text[:-1]) * {"B": 1e9, "T": 1e12, "M": 1e6}[text[-1]]


def half_unit(printed: str) -> float:
    """Half a unit of the last printed digit: "0.0120" -> 5e-5, "8.947e-11" -> 5e-15."""
    mantissa, _, exponent = printed.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


@dataclass(frozen=True)
class Cell:
    """One number of a paper beside ours."""

    row: str
    quantity: str
    paper: float
    ours: float
    tolerance: float
    status: str
    note: str = ""

    @property
    def difference(self) -> float:
        return self.ours - self.paper


@dataclass
class Comparison:
    """The cells of one table or figure. `tolerance` and `inputs` are sentences for the reader."""

    name: str
    title: str
    tolerance: str
    inputs: str = ""
    remarks: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    def add(
        self,
        row: str,
        quantity: str,
        paper: str | float,
        ours,
        *,
        relative: float | None = None,
        absolute: float | None = None,
        kind: str = "reproduced",
        cause: str = "",
    ) -> None:
        """Judges one cell: `kind` if within the tolerance (by default half a unit of the last
        printed digit), otherwise "explained" if a `cause` is given, else "neither"."""
        printed, paper = str(paper), float(paper)
        if relative is not None:
            limit = relative * abs(paper)
        else:
            limit = half_unit(printed) if absolute is None else absolute
        ours = float(ours)
        # Values that fall on the half unit itself round either way.
        inside = math.isfinite(ours) and abs(ours - paper) <= limit * (1 + 1e-6)
        status = kind if inside else ("explained" if cause else "neither")
        self.cells.append(Cell(row, quantity, paper, ours, limit, status, cause))

    def counts(self) -> dict[str, int]:
        return {s: sum(c.status == s for c in self.cells) for s in STATUSES}

    def write(self) -> Path:
        """out/paper_figs/`name`.csv, one line a cell."""
        OUT.mkdir(parents=True, exist_ok=True)
        path = OUT / f"{self.name}.csv"
        with open(path, "w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out)
            header = ("row", "quantity", "paper", "ours", "difference", "tolerance", "status")
            writer.writerow((*header, "note"))
            for c in self.cells:
                numbers = (f"{v:.8g}" for v in (c.paper, c.ours, c.difference, c.tolerance))
                writer.writerow((c.row, c.quantity, *numbers, c.status, c.note))
        return path

    def show(self, most: int = 60) -> None:
        """Prints paper | ours | difference, the cells outside their tolerance always."""
        print(f"\n{self.title}   ({self.tolerance})")
        good = [c for c in self.cells if c.status != "neither"]
        listed = self.cells if len(self.cells) <= most else good[: most // 2]
        listed = listed + [c for c in self.cells if c.status == "neither" and c not in listed]
        if listed:
            print(f"  {'':38}{'paper':>14}{'ours':>14}{'difference':>12}")
        for c in listed:
            label = f"{c.row} {c.quantity}"[:37]
            print(f"  {label:38}{c.paper:14.7g}{c.ours:14.7g}{c.difference:12.2g}  {c.status}")
        if len(listed) < len(self.cells):
            print(f"  ... {len(self.cells) - len(listed)} more cells in {self.name}.csv")
        counts = ", ".join(f"{n} {s}" for s, n in self.counts().items() if n)
        print(f"  {len(self.cells)} cells: {counts or 'figure drawn'}")
        for remark in self.remarks:
            print(f"  - {remark}")


@dataclass
class Repeat:
    """What a paper says of models we cannot train, beside what models trained here showed. Its
    lines are no cells: they are counted nowhere and stand in a section of their own.

    `models` is a sentence: which, and where the result is kept.
    """

    name: str
    title: str
    models: str
    claims: list[tuple[str, str, str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, claim: str, paper: str, ours: str, holds: bool | None) -> None:
        """`holds`: whether ours bears the claim out; None where it cannot tell."""
        verdict = {True: "holds", False: "does not hold", None: "open"}[holds]
        self.claims.append((claim, paper, ours, verdict))

    def write(self) -> Path:
        """out/paper_figs/`name`.csv, one line a claim."""
        OUT.mkdir(parents=True, exist_ok=True)
        path = OUT / f"{self.name}.csv"
        with open(path, "w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([("claim", "paper", "ours", "verdict"), *self.claims])
        return path

    def show(self) -> None:
        print(f"\n{self.title}   ({self.models})")
        for claim, paper, ours, verdict in self.claims:
            print(f"  {claim}\n      paper: {paper}\n      ours:  {ours}   [{verdict}]")
        for remark in self.remarks:
            print(f"  - {remark}")


def finish(*comparisons: Comparison | Repeat) -> list[Comparison | Repeat]:
    """Writes and prints; what every script's `run` returns."""
    for c in comparisons:
        if not isinstance(c, Comparison) or c.cells:  # a drawn figure has its points
            c.write()
        c.show()
    return list(comparisons)
