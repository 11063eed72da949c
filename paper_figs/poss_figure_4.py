"""PosS Figures 4 and 5: memory of the specialists, and the time of a round by phase.

    python -m paper_figs.poss_figure_4

Parameters of one specialist are counted from the target's config (an attention and feed-forward
layer; the paper prints about 218 M for the 8B target). Times are the fitted round costs. The
figures print no other numbers. Expected: 218 M within 1 %.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from experiments.heads_fit import fit_poss, poss_rows
from paper_figs.comparison import Comparison, finish
from paper_figs.style import panels, save
from sdx.theory.architectures import load_architecture
from sdx.theory.transformers import weight_bytes

PRESETS = {"Llama-3-8B-Instruct": "llama-3-8b", "Llama-2-13B-chat": "llama-2-13b"}
LAYERS = {"EAGLE-2, HASS": 1, "PosS-3": 2, "PosS-2": 3, "PosS-1": 6}


def specialist_parameters(preset) -> float:
    """One more decoder layer of the target's shape."""
    network = load_architecture(preset)
    one, two = (float(weight_bytes(dataclasses.replace(network, layers=float(n)))) for n in (1, 2))
    return (two - one) / 2.0  # bfloat16


def run() -> list[Comparison]:
    table = Comparison(
        "poss_figure_4",
        "PosS Figures 4, 5: cost of specialists",
        "1 %",
        "the target's config",
    )
    ours = specialist_parameters("llama-3-8b") / 1e6
    table.add("Llama-3-8B", "M parameters a specialist", 218, ours, relative=0.01)
    draw()
    return finish(table)


def draw() -> None:
    figure, axes = panels(1, 2, height=3.0)
    places = np.arange(len(LAYERS))
    for i, (target, preset) in enumerate(PRESETS.items()):
        base = float(weight_bytes(load_architecture(preset))) / 1e9
        each = specialist_parameters(preset) * 2e-9
        values = [base + n * each for n in LAYERS.values()]
        shade = ("#cccccc", "#444444")[i]
        axes[0].bar(places + 0.4 * i - 0.2, values, 0.38, color=shade, label=target)
    axes[0].set(ylabel="weights, GB (bfloat16)", xticks=places)
    axes[0].set_xticklabels(LAYERS, fontsize=7)
    axes[0].set_ylim(0, 40)
    axes[0].legend(loc="upper left")
    for i, target in enumerate(PRESETS):
        rows = poss_rows(target)
        cost, _ = fit_poss(rows, np.ones(len(rows), bool))
        depth = np.arange(6, 10)
        draft = float(cost.draft_step) * depth
        verify = np.full(len(depth), float(cost.verify))
        shade = ("#cccccc", "#444444")[i]
        axes[1].bar(depth + 0.4 * i - 0.2, verify, 0.36, color=shade, label=f"verify, {target}")
        axes[1].bar(
            depth + 0.4 * i - 0.2,
            draft,
            0.36,
            bottom=verify,
            color="white",
            edgecolor=shade,
            hatch="///",
            label="draft",
        )
    axes[1].set(xlabel="tree depth", ylabel="round / autoregressive step", xticks=depth)
    axes[1].set_ylim(0, 2.6)
    axes[1].legend(fontsize=7, loc="upper left")
    save(figure, "poss_figure_4")


if __name__ == "__main__":
    run()
