"""SDSL Table 3: the affine plane of alpha over the perplexities of draft and target.

    python -m paper_figs.sdsl_table_3

Expected: every printed digit, from the 130 pairs of Tables 1 and 2 with Table 2's target
perplexities (Table 1 has those of Qwen2.5-32B and -72B swapped).
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, as_numpy, finish, read
from paper_figs.style import pairs_of_intervals, panels, save, series
from sdx.theory.scaling import LawFit, fit_perplexity_law


def pairs() -> list[dict]:
    """Rows of Tables 1 and 2 as numbers, target perplexities from Table 2."""
    rows = read("sdsl_tables_1_2_alpha.csv")
    perplexity = {r["target"]: r["target_perplexity"] for r in rows if r["table"] == "table2"}
    numbers = ("draft_perplexity", "alpha", "alpha_ci95_half_width")
    return [
        r | {k: float(r[k]) for k in numbers} | {"y": float(perplexity[r["target"]])} for r in rows
    ]


def plane() -> tuple[list[dict], LawFit]:
    rows = pairs()
    x, y, alpha = (np.array([r[k] for r in rows]) for k in ("draft_perplexity", "y", "alpha"))
    return rows, as_numpy(fit_perplexity_law(x, alpha, y))


def run() -> list[Comparison]:
    table = Comparison(
        "sdsl_table_3",
        "SDSL Table 3: alpha = A x + B y + C",
        "every printed digit",
        "Tables 1 and 2",
        ["Misprint: Table 1 swaps the target perplexities of Qwen2.5-32B and Qwen2.5-72B."],
    )
    rows, fit = plane()
    value = np.asarray(fit.law.coefficients)
    error, margin = np.sqrt(np.diag(fit.law.covariance)), np.asarray(fit.margins)
    ours = {
        name: dict(
            estimate=value[i],
            std_error=error[i],
            moe95=margin[i],
            ci_low=value[i] - margin[i],
            ci_high=value[i] + margin[i],
        )
        for i, name in enumerate("ABC")
    }
    ours |= {"MSE": {"estimate": fit.mean_squared_error}, "R2": {"estimate": fit.r_squared}}
    for r in read("sdsl_tables_3_8_9_coefficients.csv"):
        if r["table"] == "3":
            for quantity, number in ours[r["parameter"]].items():
                table.add(r["parameter"], quantity, r[quantity], number)
    draw(table, rows, value)
    return finish(table)


def draw(table, rows, coefficients) -> None:
    """The coefficients, and what an affine law leaves unexplained."""
    figure, axes = panels(1, 4, width=9.6, height=3.4, width_ratios=(1, 1, 1, 3.2))
    pairs_of_intervals(axes[:3], table.cells)
    axis = axes[3]
    a, b, c = coefficients
    for i, (family, match) in enumerate((("OPT", "OPT"), ("Qwen", "Qwen"))):
        mine = [r for r in rows if r["draft"].startswith(match)]
        fitted = [a * r["draft_perplexity"] + b * r["y"] + c for r in mine]
        axis.plot(
            fitted,
            [r["alpha"] for r in mine],
            **series(i, line=False),
            mfc="white" if i else None,
            label=f"{family} drafts",
        )
    ends = [0.52, 0.80]
    axis.plot(ends, ends, color="#888888", linewidth=1, label="on the plane")
    axis.set(xlabel=r"fitted $\alpha = Ax + By + C$", ylabel=r"measured $\alpha$")
    axis.set_title(f"$R^2$: paper {_printed(table, 'R2')}")
    axis.legend()
    save(figure, "sdsl_table_3", table.title)


def _printed(table, name) -> str:
    cell = next(c for c in table.cells if c.row == name)
    return f"{cell.paper:g}, ours {cell.ours:.4g}"


if __name__ == "__main__":
    run()
