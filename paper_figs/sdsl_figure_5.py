"""SDSL Figure 5: N* and N*/M over target size M, draft tokens D and target tokens D'.

    python -m paper_figs.sdsl_figure_5

Expected: N* nearly linear in M (a), N*/M falling towards a constant (b), weak falls with D
(c, d), nothing to see in D' (e, f).
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.sdsl_grid import D_GRID, M_GRID
from paper_figs.style import MARKERS, panels, save, shades
from sdx.theory.scaling import optimal_draft_size

FIXED = D_GRID[3]  # the other training size while one is swept


def curves(rows, across):
    """Sweeps: (x, label, N*, N*/M) of each line of a row of panels."""
    for held in rows:
        M, D, D_target, x, label = across(held)
        N = np.asarray(optimal_draft_size(M, D, D_target).N)
        yield x, label, N, N / M


def run() -> list[Comparison]:
    one = np.ones_like
    over_m = lambda D: (M_GRID, D * one(M_GRID), FIXED * one(M_GRID), M_GRID, _t("D", D))  # noqa: E731
    over_d = lambda M: (M * one(D_GRID), D_GRID, FIXED * one(D_GRID), D_GRID, _b(M))  # noqa: E731
    over_t = lambda M: (M * one(D_GRID), FIXED * one(D_GRID), D_GRID, D_GRID, _b(M))  # noqa: E731
    panels_of = (
        (D_GRID[::2], over_m, "target size M", 1e9, "(billions)"),
        (M_GRID[::2], over_d, "draft tokens D", 1e12, "(trillions)"),
        (M_GRID[::2], over_t, "target tokens D'", 1e12, "(trillions)"),
    )
    figure, axes = panels(3, 2, width=7.2, height=7.6)
    letters = iter("abcdef")
    for (raw, normal), (rows, across, name, unit, words) in zip(axes, panels_of, strict=True):
        lines = list(curves(rows, across))
        for i, ((x, label, N, ratio), shade) in enumerate(
            zip(lines, shades(len(lines)), strict=True)
        ):
            style = dict(color=shade, marker=MARKERS[i], markersize=4, label=label)
            raw.plot(x / unit, N / 1e6, **style)
            normal.plot(x / unit, 1e3 * ratio, **style)
        for axis, quantity in ((raw, "N* (millions)"), (normal, "1000 N* / M")):
            axis.set(xlabel=f"{name} {words}", ylabel=quantity, ylim=(0, None))
            axis.set_title(f"({next(letters)}) {quantity.split(' (')[0]} over {name}")
            if unit == 1e12:  # M stays linear: N* is nearly so
                axis.set_xscale("log")
                axis.set_xticks([1, 10, 100], ["1", "10", "100"])
        raw.legend(fontsize=7, ncols=2)
    title = "SDSL Figure 5: the optimal draft over M, D and D'"
    save(figure, "sdsl_figure_5", title)
    return finish(Comparison("sdsl_figure_5", title, "drawn"))


def _t(symbol: str, tokens: float) -> str:
    return f"{symbol} = {tokens / 1e12:.1f}T"


def _b(M: float) -> str:
    return f"M = {M / 1e9:.0f}B"


if __name__ == "__main__":
    run()
