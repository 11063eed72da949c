"""Multi-level, figure: best threshold and throughput of two models over acceptance rate and cost.

    python -m paper_figs.multilevel_figure_threshold_plane

Confidence ~ Beta(2 alpha, 2 (1 - alpha)): mean alpha, uniform at one half, the more U-shaped the
nearer alpha is to 0 or 1. The crossing token is kept, as in the slides' algorithm. The gain over
the best fixed length is what knowing the confidence is worth. Expected: thresholds fall as drafts
get cheaper; the gain over fixed lengths some 10 %, where drafts mostly agree and cost about 0.15.
"""

from __future__ import annotations

import jax
import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.multilevel_figure_fixed import surface
from paper_figs.style import panels, plt, save
from sdx.theory.thresholds import BetaConfidence, threshold_chain

THRESHOLDS = np.geomspace(1e-3, 0.99, 96)
ALPHAS, COSTS = np.linspace(0.06, 0.94, 23), np.geomspace(0.01, 1.0, 81)
STEPS = 160
PANELS = (
    ("(a) optimal threshold p", [1e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ("(b) optimal throughput, over the target's", [1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 50]),
    ("(c) over the best fixed k", [1, 1.01, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12, 1.15]),
)


def optima() -> tuple[np.ndarray, np.ndarray]:
    """Best threshold and speedup [alphas, costs]; threshold 1 where drafting does not pay."""
    tokens, drafts = [], []
    with jax.enable_x64(True):

        @jax.jit
        def outcomes(alpha):
            law = BetaConfidence(a=2 * alpha, b=2 * (1 - alpha))
            one = lambda p: threshold_chain(law, p, "keep", steps=STEPS)  # noqa: E731
            return jax.vmap(one)(THRESHOLDS)

        for alpha in ALPHAS:
            found = outcomes(alpha)
            tokens.append(np.asarray(found.tokens))
            drafts.append(np.asarray(found.drafts))
    tokens, drafts = np.stack(tokens), np.stack(drafts)
    gains = tokens[..., None] / (1 + COSTS * drafts[..., None])  # [alpha, p, cost]
    best, threshold = gains.max(axis=1), THRESHOLDS[gains.argmax(axis=1)]
    return np.where(best > 1, threshold, 1.0), np.maximum(best, 1.0)


def run() -> list[Comparison]:
    thresholds, gains = optima()
    over_fixed = gains / surface(ALPHAS, COSTS)[1]
    figure, axes = panels(1, 3, width=10.8, height=3.8, sharey=True)
    for axis, values, (title, cuts) in zip(
        axes, (thresholds, gains, over_fixed), PANELS, strict=True
    ):
        greys = plt.get_cmap("Greys")(np.linspace(0.0, 0.75, len(cuts) - 1))
        if values is thresholds:
            greys = greys[::-1]
        shown = np.clip(values.T, cuts[0], cuts[-1] * 0.9999)
        filled = axis.contourf(ALPHAS, COSTS, shown, cuts, colors=greys)
        axis.contour(ALPHAS, COSTS, shown, cuts[1:-1], colors="black", linewidths=0.5)
        figure.colorbar(filled, ax=axis, ticks=cuts, format="%g")
        axis.set(yscale="log", yticks=[0.01, 0.1, 1], yticklabels=["0.01", "0.1", "1"])
        axis.set(xlabel=r"acceptance rate $\alpha$ (mean confidence)", title=title)
        axis.grid(False)
    axes[0].set_ylabel("relative cost (draft / target)")
    i, j = np.unravel_index(over_fixed.argmax(), over_fixed.shape)
    table = Comparison(
        "multilevel_figure_threshold_plane",
        "Multi-level figure: best threshold and throughput over rate and cost",
        "drawn",
        "",
        [
            f"Over the best fixed length the threshold gains up to {over_fixed[i, j] - 1:.0%} (at "
            f"alpha {ALPHAS[i]:.2f}, cost {COSTS[j]:.2g}), and never loses more than "
            f"{1 - over_fixed.min():.1%}."
        ],
    )
    save(figure, "multilevel_figure_threshold_plane", f"{table.title} (two models)")
    return finish(table)


if __name__ == "__main__":
    run()
