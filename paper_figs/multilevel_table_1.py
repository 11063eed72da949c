"""Multi-level: acceptance rates of six pairs, checked against one another.

    python -m paper_figs.multilevel_table_1

The rates are measured; no theory gives them from the models' names. What binds them: disagreement
1 - alpha is a distance (total variation, or differing argmax), so that a pair lies between the
difference and the sum of the two disagreements over a third model. And if the drafts' misses were
independent of the targets', alpha would be the product over the third model. Expected: all four
bounds hold; the product within 0.01 in two of four.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, read
from paper_figs.style import COLOURS, panels, save

ORDER = ("SmolLM-360M", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")  # small to large
TOLERANCE = 0.02


def run() -> list[Comparison]:
    rates = {
        (r["draft"], r["target"]): r["acceptance_rate"] for r in read("multilevel_acceptance.csv")
    }
    table = Comparison(
        "multilevel_table_1",
        "Multi-level: acceptance rates, as the product over a model between",
        "0.02",
        "the two other printed rates; the pairs of neighbours are measurements without a check",
    )
    found = []
    for i, draft in enumerate(ORDER):
        for j in range(i + 2, len(ORDER)):
            for between in ORDER[i + 1 : j]:
                target = ORDER[j]
                low, high = float(rates[draft, between]), float(rates[between, target])
                printed, product = rates[draft, target], low * high
                bounds = 1 - (1 - low) - (1 - high), 1 - abs(low - high)
                name = f"{draft} to {target} over {between}"
                table.add(name, "rate", printed, product, absolute=TOLERANCE, kind="predicted")
                found.append((name, float(printed), product, bounds))
    inside = sum(low <= printed <= high for _, printed, _, (low, high) in found)
    table.remarks.append(
        f"{inside} of {len(found)} lie between the bounds that the triangle inequality sets. Where "
        "the product fails it is too small: drafts and targets miss the same hard tokens."
    )
    draw("Multi-level table of acceptance rates: three models at a time", found)
    return finish(table)


def draw(title, found) -> None:
    figure, axis = panels(width=8.0, height=3.4)
    places = np.arange(len(found))[::-1]
    for place, (_, printed, product, (low, high)) in zip(places, found, strict=True):
        axis.plot([low, high], [place, place], color="#999999", linewidth=6, solid_capstyle="butt")
        axis.plot(product, place, "D", color=COLOURS[1])
        axis.plot(printed, place, "o", color="#111111", mfc="white")
    axis.plot([], [], "o", color="#111111", mfc="white", label="paper")
    axis.plot([], [], "D", color=COLOURS[1], label="ours, product over the model between")
    axis.plot([], [], color="#999999", linewidth=6, label="allowed by the other two rates")
    labels = [name.replace(" over ", "\nover ") for name, *_ in found]
    axis.set_yticks(places, labels)
    axis.set(xlabel="acceptance rate", xlim=(0, 1), ylim=(-0.6, len(found) - 0.4))
    figure.legend(loc="outside lower center", ncols=3)
    save(figure, "multilevel_table_1", title)


if __name__ == "__main__":
    run()
