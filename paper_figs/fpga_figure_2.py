"""FPGA Figure 2: roofline, discounted roofline, AAT and acceptance rate, effective performance.

    python -m paper_figs.fpga_figure_2

The four steps of the analysis on the V80 for three contexts, from the fit of Tables I and IV. The
paper draws one AAT curve per context and prints none of them; one law serves all here. Expected:
the ridge moves right with the context, and so does the best length until the plateau.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.fpga_model import LENGTHS, V80, law_and_roofline, speed
from paper_figs.style import panels, save, series

CONTEXTS = (128, 4096, 16384)


def run() -> list[Comparison]:
    law, roofline = law_and_roofline()
    x = LENGTHS
    table = Comparison("fpga_figure_2", "FPGA Figure 2: the four steps of the analysis", "drawn")
    figure, axes = panels(2, 2, width=7.8, height=5.8, sharex=True)
    for i, context in enumerate(CONTEXTS):
        style = dict(**series(i, marker=False), label=f"context {context}")
        verify = np.asarray(roofline.verify_seconds(x, context, *V80))
        draft = np.asarray(roofline.draft_seconds(x, context, V80[1]))
        effective = speed(*V80, context, x)
        axes[0, 0].plot(x, x / verify, **style)
        axes[0, 1].plot(x, x / (verify + draft), **style)
        axes[1, 1].plot(x, effective, **style)
        best = effective.argmax()
        axes[1, 1].plot(x[best], effective[best], "*", color="white", mec="black", markersize=10)
        rate = x / verify
        ridge = x[(rate > 0.999 * rate.max()).argmax()]
        table.remarks.append(f"Context {context}: ridge {ridge:.0f}, best length {x[best]:.0f}.")
    aat = np.asarray(law.aat(x))
    (rising,) = axes[1, 0].plot(x, aat, **series(0, marker=False))
    right = axes[1, 0].twinx()
    (falling,) = right.plot(x, aat / x, **series(1, marker=False))
    right.grid(False)
    right.spines["right"].set_visible(True)
    right.set(ylabel="AR = AAT / x", ylim=(0, 1.02))
    axes[1, 0].legend([rising, falling], ["AAT", "AR (right axis)"], loc="center right")
    axes[0, 0].legend(loc="lower right")
    axes[1, 1].plot([], [], "*", color="white", mec="black", markersize=10, label="best length")
    axes[1, 1].legend(*[part[-1:] for part in axes[1, 1].get_legend_handles_labels()])
    words = (
        ("(a) primary roofline model", "verified tokens/s"),
        ("(b) discounted roofline model", "verified tokens/s, drafting paid"),
        ("(c) AAT & AR model, one for all contexts", "average accepted tokens (AAT)"),
        ("(d) combined model", "effective tokens/s"),
    )
    for axis, (title, ylabel) in zip(axes.flat, words, strict=True):
        axis.set(ylabel=ylabel, ylim=(0, None))
        axis.set_title(title)
    for axis in axes[1]:
        axis.set_xlabel("verification length x")
    save(figure, "fpga_figure_2", f"{table.title} (ours; the paper prints no number)")
    return finish(table)


if __name__ == "__main__":
    run()
