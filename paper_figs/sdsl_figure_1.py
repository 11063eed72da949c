"""SDSL Figure 1: the plane of Table 3 over the measured (perplexity, perplexity, alpha) points.

    python -m paper_figs.sdsl_figure_1

Expected: a plane falling with the draft's perplexity and rising gently with the target's.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.sdsl_table_3 import plane
from paper_figs.style import COLOURS, plt, save


def run() -> list[Comparison]:
    rows, fit = plane()
    a, b, c = np.asarray(fit.law.coefficients)
    x, y, alpha = (np.array([r[k] for r in rows]) for k in ("draft_perplexity", "y", "alpha"))
    figure = plt.figure(figsize=(5.6, 4.6))
    axis = figure.add_axes((0.0, 0.02, 0.9, 0.93), projection="3d")
    gx, gy = np.meshgrid(np.linspace(x.min(), x.max(), 12), np.linspace(y.min(), y.max(), 12))
    axis.plot_surface(
        gx, gy, a * gx + b * gy + c, color="#9db8dd", alpha=0.45, linewidth=0,
        label="fitted plane (equation 5)",
    )  # fmt: skip
    for above, face in ((True, COLOURS[0]), (False, "white")):
        keep = (alpha >= a * x + b * y + c) == above
        label = "measured, above the plane" if above else "measured, below the plane"
        axis.scatter(
            x[keep], y[keep], alpha[keep], s=16, c=face, edgecolors=COLOURS[0], label=label,
            depthshade=False,
        )  # fmt: skip
    for xi, yi, ai in zip(x, y, alpha, strict=True):
        axis.plot([xi, xi], [yi, yi], [ai, a * xi + b * yi + c], color="#999999", linewidth=0.5)
    axis.set(xlabel="draft perplexity x", ylabel="target perplexity y", zlabel=r"$\alpha$")
    axis.view_init(elev=20, azim=-58)
    axis.legend(loc="upper left", bbox_to_anchor=(0.02, 0.98))
    title = "SDSL Figure 1: alpha plane over the points of Tables 1 and 2"
    save(figure, "sdsl_figure_1", title)
    return finish(Comparison("sdsl_figure_1", title, "drawn"))


if __name__ == "__main__":
    run()
