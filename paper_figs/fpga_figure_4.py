"""FPGA Figure 4: other targets and another head, from the model of Llama-3.1-8B with LongSpec.

    python -m paper_figs.fpga_figure_4

The figure prints one number a panel: the mean speedup over the contexts. Each target's lines are
those fitted on Tables I and IV, scaled by its sizes alone: weights and compute by parameters, what
grows with the context by layers and heads. The AAT law stays LongSpec's of Llama-3.1-8B. Expected:
three of the four LongSpec panels within 10 %; Vicuna-13B and EAGLE-3's two above, whose acceptance
is not the one that was carried over.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.fpga_model import LENGTHS, V80, law_and_roofline
from paper_figs.fpga_table_1 import ORIGINAL, SLOPE
from paper_figs.style import OURS_BAR, panels, save, series
from sdx.theory.architectures import load_architecture
from sdx.theory.transformers import parameters
from sdx.theory.verification import effective_performance

CONTEXTS = (128, 512, 2048, 4096, 8192, 16384)
PRINTED = {  # panel -> (target's preset, printed mean speedup)
    "LongSpec Vicuna-7B": ("vicuna-7b", 2.54),
    "LongSpec Vicuna-13B": ("vicuna-13b", 2.86),
    "LongSpec LongChat-7B": ("vicuna-7b", 2.64),  # LongChat has Vicuna's shapes
    "LongSpec LongChat-13B": ("vicuna-13b", 2.70),
    "EAGLE-3 Llama-3.1-8B": ("llama-3.1-8b", 2.97),
    "EAGLE-3 Vicuna-13B": ("vicuna-13b", 3.89),
}
OTHER_HEAD = "EAGLE-3's acceptance is not LongSpec's, whose law was carried over"


def scaled(roofline, target: str):
    """The fitted roofline for another target."""
    fitted, other = load_architecture("llama-3.1-8b"), load_architecture(target)
    size = float(parameters(other)) / float(parameters(fitted))
    heads = float(other.layers * other.heads) / float(fitted.layers * fitted.heads)
    return dataclasses.replace(
        roofline,
        weight_bytes=roofline.weight_bytes * size,
        context_bytes=roofline.context_bytes * heads,
        kappa_token=roofline.kappa_token * size,
        kappa_context=roofline.kappa_context * heads,
        draft_context_bytes=roofline.draft_context_bytes * heads,
    )


def speedups(law, roofline, context) -> np.ndarray:
    """Over autoregression, at every verification length of LENGTHS."""
    verify = np.asarray(roofline.verify_seconds(LENGTHS, context, *V80))
    draft = np.asarray(roofline.draft_seconds(LENGTHS, context, V80[1]))
    return np.asarray(effective_performance(law, LENGTHS, verify, draft)) * verify[0]


def run() -> list[Comparison]:
    table = Comparison(
        "fpga_figure_4",
        "FPGA Figure 4: mean speedup of other targets and heads",
        "10 %",
        "the fit of Tables I and IV, scaled by the targets' sizes; no number of the figure",
        ["The panels print only their mean; their bars are drawn and were not read off."],
    )
    law, roofline = law_and_roofline()
    figure, axes = panels(2, 3, width=9.6, height=5.4, sharex=True, sharey=True)
    for axis, (panel, (target, printed)) in zip(axes.ravel(), PRINTED.items(), strict=True):
        curves = np.array([speedups(law, scaled(roofline, target), c) for c in CONTEXTS])
        cause = OTHER_HEAD if panel.startswith("EAGLE") else ""
        mean = np.mean(curves.max(axis=1))
        table.add(panel, "mean speedup", printed, mean, relative=0.1, kind="predicted", cause=cause)
        lengths = draw(axis, curves, round(float(law.C + law.B / SLOPE)))
        axis.axhline(printed, label="paper, mean of the best set", **series(2, marker=False))
        axis.set_title(panel)
        words = f"mean: paper {printed:.2f}x, ours {mean:.2f}x"
        axis.text(0.98, 0.97, words, transform=axis.transAxes, ha="right", va="top", fontsize=8)
    for axis in axes[:, 0]:
        axis.set(ylabel="speedup (bars)", ylim=(0, 4.8))
    axes[1, 1].set(xlabel="context length")
    handles = [
        bars + lines
        for bars, lines in zip(
            axes[0, 0].get_legend_handles_labels(), lengths.get_legend_handles_labels(), strict=True
        )
    ]
    figure.legend(*handles, loc="outside lower center", ncols=5)
    save(figure, "fpga_figure_4", table.title)
    return finish(table)


def draw(axis, curves, naive: int):
    """Bars of the original, the naive and the best set, the best lengths as a line on an axis at
    the right, which is returned."""
    places, best = np.arange(len(CONTEXTS)), curves.argmax(axis=1)
    sets = (
        (f"ours, original set ({ORIGINAL:.0f})", curves[:, int(ORIGINAL) - 1], "#f0f0f0"),
        (f"ours, naive set ({naive})", curves[:, naive - 1], "#b4b4b4"),
        ("ours, best set", curves[places, best], OURS_BAR["color"]),
    )
    for i, (name, heights, shade) in enumerate(sets):
        at = places + 0.27 * (i - 1)
        axis.bar(at, heights, 0.26, color=shade, edgecolor="#111111", linewidth=0.7, label=name)
    axis.set_xticks(places, [f"{c / 1024:g}k" if c >= 1024 else str(c) for c in CONTEXTS])
    right = axis.twinx()
    right.plot(places, LENGTHS[best], **series(0), label="ours, best length (right axis)")
    right.grid(False)
    right.set_ylim(0, 60)
    last = axis.get_subplotspec().is_last_col()
    right.spines["right"].set_visible(last)
    right.tick_params(right=last, labelright=last)
    if last:
        right.set_ylabel("verification length (line)")
    return right


if __name__ == "__main__":
    run()
