"""PosS Figure 4: memory of the specialists.

    python -m paper_figs.poss_figure_4

Parameters of one specialist are counted from the target's config (an attention and feed-forward
layer; the paper prints about 218 M for the 8B target). The figure prints no other number, and its
bars hold caches and the framework's own memory too. Expected: 218 M within 1 %.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paper_figs.comparison import Comparison, finish
from paper_figs.style import panels, save
from sdx.theory.architectures import load_architecture
from sdx.theory.transformers import weight_bytes

PRESETS = {"Llama-3-8B-Instruct": "llama-3-8b", "Llama-2-13B-chat": "llama-2-13b"}
LAYERS = {"EAGLE-2": 1, "HASS": 1, "PosS-3": 2, "PosS-2": 3, "PosS-1": 6}


def specialist_parameters(preset) -> float:
    """One more decoder layer of the target's shape."""
    network = load_architecture(preset)
    one, two = (float(weight_bytes(dataclasses.replace(network, layers=float(n)))) for n in (1, 2))
    return (two - one) / 2.0  # bfloat16


def run() -> list[Comparison]:
    table = Comparison(
        "poss_figure_4",
        "PosS Figure 4: parameters of a specialist",
        "1 %",
        "the target's config",
    )
    ours = specialist_parameters("llama-3-8b") / 1e6
    table.add("Llama-3-8B", "M parameters a specialist", 218, ours, relative=0.01)
    draw()
    return finish(table)


def draw() -> None:
    figure, axis = panels(width=6.4, height=3.6)
    places = np.arange(len(LAYERS))
    for i, (target, preset) in enumerate(PRESETS.items()):
        base = float(weight_bytes(load_architecture(preset))) / 1e9
        each = specialist_parameters(preset) * 2e-9
        at = places + 0.4 * i - 0.2
        shade = ("#cccccc", "#7a7a7a")[i]
        axis.bar(at, base, 0.38, color=shade, edgecolor="#111111", label=f"target {target}")
        heads = [n * each for n in LAYERS.values()]
        axis.bar(at, heads, 0.38, bottom=base, color="white", edgecolor="#111111", hatch="////")
    axis.bar(0, 0, color="white", edgecolor="#111111", hatch="////", label="draft layers")
    axis.set(ylabel="memory of the weights (GB, bfloat16)", xticks=places, ylim=(0, 40))
    names = [f"{name}\n({n} layer{'s' if n > 1 else ''})" for name, n in LAYERS.items()]
    axis.set_xticklabels(names, fontsize=8)
    axis.legend(loc="upper left")
    save(figure, "poss_figure_4", "PosS Figure 4: GPU memory (ours: weights, without caches)")


if __name__ == "__main__":
    run()
