"""SDSL Table 9: N* = mu M + M0, pooled over 288 optima.

    python -m paper_figs.sdsl_table_9

Expected: coefficients, margins and R^2 within 1 %.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, read
from paper_figs.sdsl_grid import hc3_regression, optima
from paper_figs.style import COLOURS, pairs_of_intervals, panels, save


def run() -> list[Comparison]:
    table = Comparison(
        "sdsl_table_9",
        "SDSL Table 9: the rule N* = mu M + M0",
        "1 %",
        "288 optima of equation 9",
        ["1/mu is 369: the text's 'about 200 times smaller' belongs to Table 8's mu."],
    )
    grid, ours = optima()
    M, N = grid[:, 0], np.asarray(ours.N)
    beta, margins, r_squared = hc3_regression(np.stack([M, np.ones_like(M)], axis=1), N)
    found = dict(mu=(beta[0], margins[0]), M0=(beta[1], margins[1]))
    for r in read("sdsl_tables_3_8_9_coefficients.csv"):
        if r["table"] != "9":
            continue
        name = r["parameter"]
        if name == "R2":
            table.add(name, "estimate", r["estimate"], r_squared, relative=0.01)
            continue
        value, margin = found[name]
        for quantity, number in (
            ("estimate", value),
            ("moe95", margin),
            ("ci_low", value - margin),
            ("ci_high", value + margin),
        ):
            table.add(name, quantity, r[quantity], number, relative=0.01)
    draw(table, M, N, beta)
    return finish(table)


def draw(table, M, N, beta) -> None:
    figure, axes = panels(1, 3, width=8.4, height=3.4, width_ratios=(1, 1, 3.2))
    pairs_of_intervals(axes[:2], table.cells)
    axis = axes[2]
    axis.plot(M / 1e9, N / 1e6, ".", color=COLOURS[1], markersize=4, label="288 optima (ours)")
    line = np.array([13e9, 110e9])
    axis.plot(line / 1e9, (beta[0] * line + beta[1]) / 1e6, color="#111111", label="ours")
    paper = [c.paper for c in table.cells if c.quantity == "estimate"]
    rule = (paper[0] * line + paper[1]) / 1e6
    axis.plot(line / 1e9, rule, "--", color="#e0a030", label="paper (on ours)")
    axis.set(xlabel="target size M (billions)", ylabel="optimal draft size N* (millions)")
    axis.legend()
    save(figure, "sdsl_table_9", table.title)


if __name__ == "__main__":
    run()
