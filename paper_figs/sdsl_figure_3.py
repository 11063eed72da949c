"""SDSL Figure 3: alpha against the draft's perplexity, one panel per target, Table 4's laws.

    python -m paper_figs.sdsl_figure_3

Expected: alpha falls with the draft's perplexity for every target and under every law.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.sdsl_table_3 import pairs
from paper_figs.sdsl_table_4 import KINDS, fits
from paper_figs.style import panels, save, series
from sdx.theory.scaling import acceptance_of_perplexity


def run() -> list[Comparison]:
    rows, found = pairs(), fits()
    targets = list(dict.fromkeys(r["target"] for r in rows))
    figure, axes = panels(3, 5, width=9.6, height=5.6, sharex=True, sharey=True)
    x = np.linspace(12, 30.5, 80)
    for axis, target in zip(axes.flat, targets, strict=False):
        mine = [r for r in rows if r["target"] == target]
        for family, face in (("OPT", "#111111"), ("Qwen", "white")):
            points = [r for r in mine if r["draft"].startswith(family)]
            axis.errorbar(
                [r["draft_perplexity"] for r in points],
                [r["alpha"] for r in points],
                [r["alpha_ci95_half_width"] for r in points],
                fmt="o",
                color="#111111",
                mfc=face,
                markersize=4,
                label=f"{family} drafts",
            )
        for i, name in enumerate(KINDS):
            law = found[target, name].law
            style = series(i + 1, marker=False) | {"linewidth": 1.1}
            axis.plot(x, acceptance_of_perplexity(law, x, np.ones_like(x)), label=name, **style)
        axis.set_title(target)
    for axis in axes.flat[len(targets) :]:
        axis.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="lower right", bbox_to_anchor=(0.93, 0.12))
    legend.set_in_layout(False)  # it stands on the empty panels
    figure.supxlabel("draft perplexity", fontsize=9)
    figure.supylabel(r"acceptance rate $\alpha$", fontsize=9)
    save(figure, "sdsl_figure_3")
    title = "SDSL Figure 3: alpha against draft perplexity"
    return finish(Comparison("sdsl_figure_3", title, "drawn"))


if __name__ == "__main__":
    run()
