"""Multi-level, figure: throughput of two models against the threshold, uniform confidence.

    python -m paper_figs.multilevel_figure_threshold

Expected: a maximum between drafting too much (small thresholds) and nothing (large ones), moving
to larger thresholds as the draft gets dearer.
"""

from __future__ import annotations

import jax
import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.style import panels, save, series
from sdx.theory.thresholds import BetaConfidence, threshold_chain

COSTS = (0.02, 0.05, 0.1, 0.2, 0.4)
CROSSING = {  # what becomes of the token that crosses the threshold
    "keep": "ThresholdGen: the crossing token is kept",
    "drop": "the slide's V(p): it is dropped",
}
THRESHOLDS = np.geomspace(0.01, 0.99, 41)


def outcomes(crossing: str):
    """Tokens and drafts of one round at each threshold; the law does not depend on the cost."""
    with jax.enable_x64(True):
        law = BetaConfidence(a=1.0, b=1.0)
        one = lambda p: threshold_chain(law, p, crossing, steps=160)  # noqa: E731
        found = jax.vmap(one)(THRESHOLDS)
    return np.asarray(found.tokens), np.asarray(found.drafts)


def run() -> list[Comparison]:
    figure, axes = panels(1, 2, width=8.4, height=4.0, sharey=True)
    for axis, (crossing, words) in zip(axes, CROSSING.items(), strict=True):
        tokens, drafts = outcomes(crossing)
        for i, cost in enumerate(COSTS):
            gains = tokens / (1 + cost * drafts)
            axis.plot(THRESHOLDS, gains, label=f"draft costs {cost:g}", **series(i, marker=False))
            best = gains.argmax()
            axis.plot(THRESHOLDS[best], gains[best], **series(i, line=False), markersize=7)
        axis.axhline(1, color="#888888", linewidth=0.8, label="target alone")
        axis.set(xscale="log", xlabel="threshold p", title=words)
        axis.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes[0].set_ylabel("throughput over the target's")
    best = dict(color="#888888", marker="o", markersize=7, linestyle="none")
    axes[0].plot([], [], **best, label="best threshold")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    title = "Multi-level figure: throughput against threshold, uniform confidence"
    save(figure, "multilevel_figure_threshold", title)
    return finish(Comparison("multilevel_figure_threshold", title, "drawn"))


if __name__ == "__main__":
    run()
