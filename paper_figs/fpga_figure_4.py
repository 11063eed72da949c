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
from paper_figs.style import panels, save, series
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


def best(law, roofline, context) -> tuple[float, float]:
    """Best verification length and its speedup over autoregression."""
    verify = np.asarray(roofline.verify_seconds(LENGTHS, context, *V80))
    draft = np.asarray(roofline.draft_seconds(LENGTHS, context, V80[1]))
    speed = np.asarray(effective_performance(law, LENGTHS, verify, draft))
    return float(LENGTHS[speed.argmax()]), float(speed.max() * verify[0])


def run() -> list[Comparison]:
    table = Comparison(
        "fpga_figure_4",
        "FPGA Figure 4: mean speedup of other targets and heads",
        "10 %",
        "the fit of Tables I and IV, scaled by the targets' sizes; no number of the figure",
        ["The panels print only their mean; their bars are drawn and were not read off."],
    )
    law, roofline = law_and_roofline()
    figure, axes = panels(2, 3, width=8.4, height=4.6, sharex=True, sharey=True)
    for axis, (panel, (target, printed)) in zip(axes.ravel(), PRINTED.items(), strict=True):
        lengths, speedups = zip(
            *(best(law, scaled(roofline, target), c) for c in CONTEXTS), strict=True
        )
        cause = OTHER_HEAD if panel.startswith("EAGLE") else ""
        mean = np.mean(speedups)
        table.add(panel, "mean speedup", printed, mean, relative=0.1, kind="predicted", cause=cause)
        places = np.arange(len(CONTEXTS))
        axis.bar(places, speedups, color="#9db4d6", edgecolor="#111111", label="ours")
        axis.axhline(printed, label="paper, mean", **series(2, marker=False))
        axis.set_title(panel)
        axis.set_xticks(places, [f"{c / 1024:g}k" if c >= 1024 else str(c) for c in CONTEXTS])
        for place, length, speedup in zip(places, lengths, speedups, strict=True):
            axis.text(place, speedup - 0.1, f"{length:.0f}", ha="center", va="top", fontsize=7)
    axes[0, 0].set(ylabel="speedup (in bars: best length)")
    axes[1, 0].set(ylabel="speedup (in bars: best length)")
    axes[1, 1].set(xlabel="context")
    axes[0, 0].set_ylim(0, 4.4)
    axes[0, 0].legend(loc="upper left")
    save(figure, "fpga_figure_4")
    return finish(table)


if __name__ == "__main__":
    run()
