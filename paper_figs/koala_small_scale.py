"""KOALA on heads trained here: layers and the adversary, beside the paper's claims.

    python -m paper_figs.koala_small_scale

From experiments/results/draft_heads.json (python -m experiments.draft_heads): EAGLE and Medusa
heads with K layers on the small target, with and without the adversary, intervals over seeds.
Expected: more layers accept more; whether the adversary helps is within the seeds' spread.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from paper_figs.comparison import Repeat, finish
from paper_figs.style import panels, save, series

RESULT = Path(__file__).parent.parent / "experiments" / "results" / "draft_heads.json"
PAPER_GAINS = {  # of the mean length, Table 1, three targets
    "EAGLE K=2 - EAGLE": "+0.28 to +0.32",
    "EAGLE K=3 - EAGLE": "+0.42 to +0.45",
    "Medusa K=2 - Medusa K=1": "+0.18 to +0.20",
    "Medusa K=3 - Medusa K=1": "+0.25 to +0.38",
    "KOALA K=1 - EAGLE": "+0.06 to +0.09",
    "KOALA K=2 - EAGLE K=2": "+0.06 to +0.09",
}
FAMILIES = {
    "EAGLE": ("EAGLE", "EAGLE K=2", "EAGLE K=3"),
    "EAGLE with adversary": ("KOALA K=1", "KOALA K=2", "KOALA K=3"),
    "Medusa": ("Medusa K=1", "Medusa K=2", "Medusa K=3"),
}


def heads() -> dict:
    """The study's result; FileNotFoundError with the command if it was not run."""
    if not RESULT.is_file():
        raise FileNotFoundError("run python -m experiments.draft_heads first")
    return without_null(json.loads(RESULT.read_text(encoding="utf-8")))


def without_null(value):
    """JSON's null is an interval that one seed cannot give: NaN."""
    if isinstance(value, dict):
        return {key: without_null(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_null(v) for v in value]
    return float("nan") if value is None else value


def with_interval(values) -> str:
    mean, low, high = values
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" if np.isfinite(low) else f"{mean:+.3f}"


def above_zero(values) -> bool | None:
    """Whether a difference over seeds is above 0, None if the interval has 0 in it."""
    _, low, high = values
    return True if low > 0 else False if high < 0 else None


def below(one, other) -> bool | None:
    """Whether the first interval lies below the second; None if they overlap or are missing."""
    return True if one[2] < other[1] else False if one[1] > other[2] else None


def which_models(r: dict) -> str:
    s = r["settings"]
    return (
        f"Heads on the small target ({s['target']['parameters'] / 1e6:.1f} M parameters, Python "
        f"text), {s['updates']} updates of four of {s['sequences']} sequences, {len(s['seeds'])} "
        "seeds a head; means with 95 % over seeds, chains of held-out text."
    )


def run() -> list[Repeat]:
    r = heads()
    table = Repeat("koala_small_scale", "KOALA, Tables 1 and 2", which_models(r))
    for pair, printed in PAPER_GAINS.items():
        of = r["compared"][pair]
        words = "the adversary lengthens" if pair.startswith("KOALA") else "layers lengthen"
        table.add(
            f"{pair}: {words} the accepted drafts (T = 0)",
            printed,
            with_interval(of["tau, T = 0"]),
            above_zero(of["tau, T = 0"]),
        )
        if pair == "EAGLE K=2 - EAGLE":
            table.add(
                f"{pair}: at T = 1 less",
                "+0.15",
                with_interval(of["tau, T = 1"]),
                below(of["tau, T = 1"], of["tau, T = 0"]),
            )
    law = r["head_law"]["K"]
    mine, truth = law["predicted_best"], law["measured_best"]
    table.add(
        "the best number of layers",
        "K = 2 (EAGLE, three targets)",
        f"law: {mine[0]}, lookahead {mine[1]}; measured: {truth[0]}, lookahead {truth[1]}; the "
        f"law's choice reaches {law['measured_at_predicted_over_best']:.1%} of the best",
        truth[0].endswith("K=2"),
    )
    draw(r)
    return finish(table)


def draw(r: dict) -> None:
    figure, axes = panels(1, 2, width=8.4, height=3.4)
    for axis, t in zip(axes, ("0", "1"), strict=True):
        for i, (family, arms) in enumerate(FAMILIES.items()):
            layers = np.arange(1, 1 + len(arms))
            values = np.array([r["arms"][arm]["tau_of_8_drafts"][t] for arm in arms])
            half = np.nan_to_num(values[:, 2] - values[:, 0])
            at = layers + 0.04 * (i - 1)
            axis.errorbar(at, values[:, 0], half, capsize=3, label=family, **series(i))
        axis.set(title=f"T = {t}", xlabel="layers K", xticks=[1, 2, 3])
    axes[0].set_ylabel("mean length of a chain of eight drafts")
    axes[0].legend()
    save(
        figure,
        "koala_small_scale",
        "KOALA at small scale: layers and adversary on heads trained here",
    )


if __name__ == "__main__":
    run()
