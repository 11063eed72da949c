"""SDSL Figure 3: alpha against the draft's perplexity, one panel per target, Table 4's laws.

    python -m paper_figs.sdsl_figure_3

Expected: alpha falls with the draft's perplexity for every target and under every law.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.sdsl_table_3 import pairs
from paper_figs.sdsl_table_4 import KINDS, fits
from paper_figs.style import plt, save, series
from sdx.theory.scaling import acceptance_of_perplexity

PANELS = {"Qwen1.5-110B": "(a) ", "LLaMa3.1-70B": "(b) "}  # what the paper's figure shows


def layout(targets):
    """The paper's two panels large, the other targets' small below; one more for the legend."""
    small = [t for t in targets if t not in PANELS] + ["legend"]
    large = [name for name in PANELS for _ in range(3)]
    mosaic = [large, large, small[:6], small[6:]]
    figure, axes = plt.subplot_mosaic(mosaic, figsize=(9.6, 7.2), layout="constrained")
    legend, first = axes.pop("legend"), axes[small[0]]
    for target, axis in axes.items():
        axis.set_xticks(range(15, 31, 5))
        if target not in PANELS:
            axis.set_ylim(0.5, 0.82)
        if axis.get_subplotspec().colspan.start and target not in PANELS:
            axis.sharey(first)
            axis.tick_params(labelleft=False)
    return figure, axes, legend


def run() -> list[Comparison]:
    rows, found = pairs(), fits()
    targets = list(dict.fromkeys(r["target"] for r in rows))
    figure, axes, legend = layout(targets)
    x = np.linspace(12, 30.5, 80)
    for target, axis in axes.items():
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
        axis.set_title(PANELS.get(target, "") + target)
    legend.set_axis_off()
    legend.legend(*next(iter(axes.values())).get_legend_handles_labels(), loc="center")
    figure.supxlabel("draft perplexity", fontsize=9)
    figure.supylabel(r"acceptance rate $\alpha$", fontsize=9)
    title = "SDSL Figure 3: alpha against draft perplexity"
    save(figure, "sdsl_figure_3", f"{title}, (a) and (b); Table 4's other targets below")
    return finish(Comparison("sdsl_figure_3", title, "drawn"))


if __name__ == "__main__":
    run()
