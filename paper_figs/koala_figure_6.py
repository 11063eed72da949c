"""KOALA Figure 6: what adversarial training alone gains, greedy.

    python -m paper_figs.koala_figure_6

It changes no head and costs nothing at decoding, so that speed gains what the length gains. The
text prints the range of the gain over both families and three targets: 0.10x to 0.19x. Expected:
ours 0.04x to 0.07x.
"""

from __future__ import annotations

import numpy as np

from experiments.heads_fit import TARGETS
from paper_figs.comparison import Comparison, finish
from paper_figs.koala_speedups import (
    BEYOND,
    FAMILIES,
    PLAIN_SPEEDUP,
    lengths,
    plain_level,
    printed_range,
    rises,
)
from paper_figs.style import panels, save

PRINTED = ("0.10", "0.19")


def run() -> list[Comparison]:
    table = Comparison(
        "koala_figure_6",
        "KOALA Figure 6: gain of adversarial training in speed, times",
        "half a unit of the last digit",
        "lengths of Table 1, the plain heads' speedups behind the text's ranges",
        [BEYOND],
    )
    of, everything = lengths(), []
    figure, axes = panels(1, 2, width=8.4, height=3.8)
    places = np.arange(len(TARGETS))
    for axis, family in zip(axes, FAMILIES, strict=True):
        plain = PLAIN_SPEEDUP[family]
        gain = plain * np.array([of[t, f"{family}+AL"] / of[t, family] - 1 for t in TARGETS])
        everything.extend(gain)
        axis.axhspan(*(plain + float(end) for end in PRINTED), **printed_range(PRINTED, "x"))
        rises(axis, places, gain, family, label="ours")
        plain_level(axis, plain, family)
        for place, value in zip(places, gain, strict=True):
            at = plain + value + 0.003
            axis.text(place, at, f"+{value:.2f}x", ha="center", va="bottom", fontsize=7)
        axis.set_xticks(places, TARGETS)
        axis.set(title=f"{family} w/ AL over {family}", ylim=(plain - 0.03, plain + 0.3))
        axis.legend(loc="upper left")
    for name, printed, ours in zip(
        ("least", "largest"), PRINTED, (min(everything), max(everything)), strict=True
    ):
        table.add(f"{name} of six heads", "gain", printed, ours)
    axes[0].set_ylabel("speedup ratio")
    save(figure, "koala_figure_6", "KOALA Figure 6: speedup ratios with adversarial learning")
    return finish(table)


if __name__ == "__main__":
    run()
