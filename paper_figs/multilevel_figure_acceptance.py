"""Multi-level, figure: how acceptance varies, and acceptance against the draft's confidence.

    python -m paper_figs.multilevel_figure_acceptance

The slides show Llama 3.2 1B -> 3B; ours is the small trained pair on held-out text, from
experiments/results/acceptance_confidence.json (python -m experiments.acceptance_confidence).
Expected: no single acceptance rate but a wide distribution; acceptance rises with confidence.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from paper_figs.comparison import Repeat, finish
from paper_figs.style import panels, save, series

RESULT = Path(__file__).parent.parent / "experiments" / "results" / "acceptance_confidence.json"
LEAST = 20  # positions in a bin of confidence that is drawn


def run() -> list[Repeat]:
    if not RESULT.is_file():
        raise FileNotFoundError("run python -m experiments.acceptance_confidence first")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    edges = np.linspace(0, 1, result["bins"] + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    table = Repeat(
        "multilevel_figure_acceptance",
        "Multi-level figure: acceptance rate distribution, acceptance against confidence",
        "Measured on the small trained pair, held-out text, temperature 1 (rates) and 0 "
        "(acceptance against confidence); the slides draw Llama 3.2 1B to 3B and print no number.",
    )
    figure, axes = panels(1, 2, width=8.4, height=3.6)
    for i, (name, s) in enumerate(result["drafts"].items()):
        label = name.replace("_", " ")
        share = np.array(s["rate_histogram"]) / s["positions"]
        axes[0].stairs(share, edges, label=label, **_line(i))
        enough = np.array(s["confidence_counts"]) >= LEAST
        rate = np.array(s["agreement_by_confidence"], float)
        axes[1].plot(middle[enough], rate[enough], label=label, **series(i))
        table.add(
            f"{label}: the rate is not constant",
            "a wide distribution (drawn)",
            f"mean {s['mean_rate']:.3f}, standard deviation between contexts "
            f"{s['rate_standard_deviation']:.3f}",
            s["rate_standard_deviation"] > 0.1,
        )
        seen = rate[enough]
        table.add(
            f"{label}: acceptance rises with confidence",
            "rising (drawn)",
            f"{seen[0]:.2f} in the lowest bin of confidence, {seen[-1]:.2f} in the highest; "
            f"{(np.diff(seen) > 0).sum()} of {len(seen) - 1} steps rise",
            bool(np.mean(np.diff(seen) > 0) > 0.75),
        )
    axes[1].plot([0, 1], [0, 1], color="#888888", linewidth=1, label="rate = confidence")
    axes[0].set(xlabel="acceptance rate of one token", ylabel="share of positions")
    axes[0].set_title("(a) acceptance rate distribution")
    axes[1].set_title("(b) acceptance rate against confidence of the token")
    axes[1].set(
        xlabel="confidence (from logits)", ylabel="acceptance rate (greedy)", ylim=(0, 1.03)
    )
    axes[0].legend(loc="upper left")
    axes[1].legend(loc="lower right")
    title = "Multi-level figure: acceptance rate is not constant (the trained pair of this project)"
    save(figure, "multilevel_figure_acceptance", title)
    return finish(table)


def _line(i: int) -> dict:
    style = series(i, marker=False)
    return {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.5}


if __name__ == "__main__":
    run()
