"""PosS Figure 3: acceptance by position (pos-acc), drafts of eight, Llama-3-8B-Instruct.

    python -m paper_figs.poss_figure_3

As Figure 1, two positions further. The figure prints no numbers; the text says that EAGLE-2 is
below 65 % from the fifth position on and that PosS stays above HASS to the last. Expected: both.
"""

from __future__ import annotations

from paper_figs.comparison import Comparison, finish
from paper_figs.poss_figure_1 import draw, hazards
from paper_figs.style import panels, save

BOUND, FROM = 65, 5  # percent, position


def run() -> list[Comparison]:
    rates = hazards("Llama-3-8B-Instruct", 8)
    eagle = 100 * rates["EAGLE-2"]
    above = all(rates[m][k] > rates["HASS"][k] for m in rates if "PosS" in m for k in range(1, 8))
    table = Comparison(
        "poss_figure_3",
        "PosS Figure 3: acceptance by position, drafts of eight",
        "drawn",
        "lengths of Tables 1 and 2 (no rate by position)",
        [
            f"EAGLE-2 at position {FROM}: {eagle[FROM - 1]:.0f} % (the text: below {BOUND} % from "
            f"there on); PosS-1 to -3 {'above' if above else 'not above'} HASS at every position "
            "from the second on.",
        ],
    )
    figure, axis = panels(width=6.0, height=4.2)
    draw(axis, rates)
    words = f"paper: EAGLE-2 below {BOUND} % from {FROM} on"
    axis.plot([FROM, 8.3], [BOUND, BOUND], color="#888888", linewidth=3, label=words, zorder=0)
    axis.legend(loc="lower left")
    axis.set_title("ours, from the lengths; Llama-3-8B-Instruct")
    save(figure, "poss_figure_3", table.title)
    return finish(table)


if __name__ == "__main__":
    run()
