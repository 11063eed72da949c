"""Multi-level, figure: best k and best throughput of two models over acceptance rate and cost.

    python -m paper_figs.multilevel_figure_fixed

Expected: k grows towards cheap drafts that agree; speedup 1 (do not speculate) where the draft is
dear and disagrees, exactly where alpha <= c.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.style import panels, plt, save
from sdx.theory.acceptance import Geometric, expected_tokens

LENGTHS = np.arange(0, 33)


def surface(alphas, costs) -> tuple[np.ndarray, np.ndarray]:
    """Best k and speedup [alphas, costs] over all k up to 32."""
    tokens = np.stack([np.asarray(expected_tokens(Geometric(alpha=alphas), k)) for k in LENGTHS])
    gains = tokens[:, :, None] / (1 + LENGTHS[:, None, None] * costs[None, None, :])
    return LENGTHS[gains.argmax(axis=0)], gains.max(axis=0)


def run() -> list[Comparison]:
    alphas, costs = np.linspace(0.02, 0.98, 97), np.geomspace(0.01, 1.0, 81)
    lengths, gains = surface(alphas, costs)
    figure, axes = panels(1, 2, width=9.0, height=3.8, sharey=True)
    levels = (
        (
            axes[0],
            lengths,
            [-0.5, 0.5, 1.5, 2.5, 3.5, 5.5, 8.5, 16.5, 32.5],
            "(a) optimal value for k",
        ),
        (
            axes[1],
            gains,
            [1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 50],
            "(b) optimal throughput, over the target's",
        ),
    )
    for axis, values, cuts, title in levels:
        greys = plt.get_cmap("Greys")(np.linspace(0.0, 0.75, len(cuts) - 1))
        shown = np.minimum(values.T, cuts[-1] * 0.999)
        filled = axis.contourf(alphas, costs, shown, cuts, colors=greys)
        lines = axis.contour(
            alphas, costs, values.T, cuts[1:] if values is lengths else cuts, colors="black",
            linewidths=0.5,
        )  # fmt: skip
        if values is gains:  # the steeper levels are too narrow for a number
            axis.clabel(lines, cuts[1:5], fontsize=7, fmt="%g", colors="black")
        bar = figure.colorbar(filled, ax=axis, format="%g")
        if values is lengths:
            marks = [0, 1, 2, 3, 4.5, 7, 12.5, 24.5]
            bar.set_ticks(marks, labels=["0", "1", "2", "3", "4-5", "6-8", "9-16", "17-32"])
        axis.set(yscale="log", yticks=[0.01, 0.1, 1], yticklabels=["0.01", "0.1", "1"])
        axis.set(xlabel=r"acceptance rate $\alpha$", title=title)
        axis.grid(False)
    axes[0].set_ylabel("relative cost (draft / target)")
    title = "Multi-level figure: best k and throughput over rate and cost"
    save(figure, "multilevel_figure_fixed", f"{title} (two models)")
    return finish(Comparison("multilevel_figure_fixed", title, "drawn"))


if __name__ == "__main__":
    run()
