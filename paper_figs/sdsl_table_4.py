"""SDSL Table 4: alpha against the draft's perplexity, three laws for each of 13 targets.

    python -m paper_figs.sdsl_table_4

Expected: all 39 rows within one unit of the last printed digit, 387 of 390 cells within half a
unit, margins (Student-t, n - 2 degrees of freedom) included.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, as_numpy, finish, half_unit, read
from paper_figs.sdsl_table_3 import pairs
from paper_figs.style import panels, save, series
from sdx.theory.scaling import fit_perplexity_law

KINDS = {"Linear": "affine", "Logarithmic": "log", "Power-law": "power"}


def fits() -> dict[tuple[str, str], object]:
    """(target, law's printed name) -> LawFit of alpha on the draft's perplexity alone."""
    rows, found = pairs(), {}
    for target in dict.fromkeys(r["target"] for r in rows):
        mine = [r for r in rows if r["target"] == target]
        x, alpha = (np.array([r[k] for r in mine]) for k in ("draft_perplexity", "alpha"))
        for name, kind in KINDS.items():
            found[target, name] = as_numpy(fit_perplexity_law(x, alpha, kind=kind))
    return found


def printed_form(name: str, fit) -> dict[str, float]:
    """The table's columns. A power law is printed as prefactor x^exponent."""
    first, second = float(fit.law.coefficients[0]), float(fit.law.coefficients[2])
    margin_1, margin_2 = float(fit.margins[0]), float(fit.margins[2])
    if name == "Power-law":
        first, second = np.exp(second), first
        margin_1, margin_2 = first * margin_2, margin_1  # d exp(c) = exp(c) dc
    return dict(
        param1=first,
        moe1=margin_1,
        ci1_low=first - margin_1,
        ci1_high=first + margin_1,
        param2=second,
        moe2=margin_2,
        ci2_low=second - margin_2,
        ci2_high=second + margin_2,
        mse=float(fit.mean_squared_error),
        r2=float(fit.r_squared),
    )


def run() -> list[Comparison]:
    table = Comparison(
        "sdsl_table_4",
        "SDSL Table 4: alpha of the draft's perplexity",
        "one unit of the last printed digit",
        "Tables 1 and 2",
        ["The margins are Student-t with n - 2 degrees of freedom, which the paper does not say."],
    )
    found = fits()
    for r in read("sdsl_table_4_alpha_vs_draft_perplexity.csv"):
        fit = found[r["target"], r["function"]]
        for quantity, number in printed_form(r["function"], fit).items():
            row, unit = f"{r['target']} {r['function']}", 2 * half_unit(r[quantity])
            table.add(row, quantity, r[quantity], number, absolute=unit)
    close = sum(abs(c.difference) <= c.tolerance / 2 for c in table.cells)
    table.remarks.append(
        f"{close} of {len(table.cells)} cells within half a unit of the last digit."
    )
    draw(table)
    return finish(table)


def draw(table) -> None:
    """Error and R^2 of the three laws per target: none of them wins everywhere."""
    targets = list(dict.fromkeys(c.row.rsplit(" ", 1)[0] for c in table.cells))
    columns = {"mse": (1e4, r"MSE of $\alpha$ ($10^{-4}$)"), "r2": (1, r"$R^2$")}
    figure, axes = panels(2, 1, width=8.4, height=5.2, sharex=True)
    for axis, (quantity, (unit, words)) in zip(axes, columns.items(), strict=True):
        for i, name in enumerate(KINDS):
            mine = [c for c in table.cells if c.quantity == quantity and c.row.endswith(name)]
            at = np.arange(len(targets)) + 0.22 * (i - 1)
            style = series(i, line=False)
            paper = style | {"mfc": "white", "markersize": 7}
            axis.plot(at, [unit * c.paper for c in mine], **paper, label=f"paper, {name}")
            ours = style | {"markersize": 2.5}
            axis.plot(at, [unit * c.ours for c in mine], **ours, label=f"ours, {name}")
        axis.set_ylabel(words)
    axes[0].set_ylim(0, None)
    axes[1].set_xticks(range(len(targets)), targets, rotation=30, ha="right")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, "sdsl_table_4", table.title)


if __name__ == "__main__":
    run()
