"""The report of experiments/draft_heads.py: intervals over seeds, head law, figures, JSON.

    python -m experiments.draft_heads --stage report

Writes experiments/results/draft_heads.json, draft_heads.md, draft_heads_positions.png and
draft_heads_tau.png.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optimistix
from scipy.stats import t as student

from experiments.draft_heads_arms import ARMS, DEPTHS, LATER, costs_of, lines_of, say
from experiments.provenance import provenance
from sdx.calibration.draft_heads import StepCosts
from sdx.reporting.data import to_data
from sdx.theory.heads import HeadLaw, fit_rate_law

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# n, 0: one layer for all; those that went on from the trained head
UNROLLED = {"trained HASS": 0.0, "trained PosS-1": 1.0, "trained PosS-2": 2.0}
UNROLLED["trained PosS-3"] = 3.0
LAYERED = {"EAGLE": (1, 0), "EAGLE K=2": (2, 0), "EAGLE K=3": (3, 0)}
LAYERED |= {f"KOALA K={k}": (k, 1) for k in (1, 2, 3)}


def interval(values) -> list[float]:
    """[mean, low, high], 95 % by Student's t over seeds; no interval from one seed."""
    values = np.asarray(values, float)
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return [mean, float("nan"), float("nan")]
    half = float(student.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return [mean, mean - half, mean + half]


def paired(a: dict[int, float], b: dict[int, float]) -> list[float]:
    """Interval of the difference a - b over the seeds that both have."""
    seeds = sorted(a.keys() & b.keys())
    return interval([a[s] - b[s] for s in seeds])


def by_seed(lines: list[dict], arm: str, value) -> dict[int, float]:
    return {line["seed"]: value(line) for line in lines if line["arm"] == arm}


def arms_of(trained: list[dict], decoded: list[dict]) -> dict[str, Any]:
    """Per arm: pos-acc with intervals, tau of an 8-draft chain, decoded tau, costs of training."""
    found: dict[str, Any] = {}
    names = {line["arm"] for line in trained}
    for arm in (arm.name for arm in (*LATER, *ARMS) if arm.name in names):
        lines = [line for line in trained if line["arm"] == arm]
        taus = [line["tau"] for line in decoded if line["arm"] == arm]
        found[arm] = {
            "seeds": [line["seed"] for line in lines],
            "parameters": lines[0]["parameters"],
            "bytes_bfloat16": lines[0]["bytes_bfloat16"],
            "training_seconds": interval([line["seconds"] for line in lines]),
            "survival_weights": [line["survival_weights"] for line in lines],
            "pos_acc": {
                t: [interval(h) for h in zip(*(x["hazards"][t] for x in lines), strict=True)]
                for t in ("0", "1")
            },
            "tau_of_8_drafts": {
                t: interval([1 + sum(x["survival"][t]) for x in lines]) for t in ("0", "1")
            },
            "tau_decoded": {
                name: interval([tau[name] for tau in taus]) for name in (taus[0] if taus else {})
            },
        }
    return found


def compared(trained: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Differences over seeds (paired), first against second: tau at T = 0 and 1, and pos-acc."""
    pairs = [
        ("HASS", "EAGLE"), ("PosS-1", "EAGLE"), ("PosS-2", "EAGLE"), ("PosS-3", "EAGLE"),
        ("PosS-1", "HASS"), ("PosS-2", "HASS"),
        ("PosS-3", "HASS"), ("EAGLE-3", "EAGLE"), ("EAGLE-3", "HASS"), ("EAGLE K=2", "EAGLE"),
        ("EAGLE K=3", "EAGLE"), ("KOALA K=1", "EAGLE"), ("KOALA K=2", "EAGLE K=2"),
        ("KOALA K=3", "EAGLE K=3"), ("Medusa K=2", "Medusa K=1"), ("Medusa K=3", "Medusa K=1"),
        ("EAGLE-3 TV", "EAGLE-3"), ("EAGLE-3 throughput", "EAGLE-3"),
        ("EAGLE-3 throughput", "EAGLE-3 TV"),
        *((f"trained {a}", "trained EAGLE") for a in ("HASS", "PosS-1", "PosS-2", "PosS-3")),
        *((f"trained PosS-{n}", "trained HASS") for n in (1, 2, 3)),
        ("trained KOALA K=1", "trained EAGLE"), ("trained KOALA 0.05", "trained EAGLE"),
    ]  # fmt: skip
    measures = {
        "tau, T = 0": lambda line: 1 + sum(line["survival"]["0"]),
        "tau, T = 1": lambda line: 1 + sum(line["survival"]["1"]),
        "pos-acc 1, T = 0": lambda line: line["hazards"]["0"][0],
        "pos-acc 1, T = 1": lambda line: line["hazards"]["1"][0],
        "pos-acc 4, T = 0": lambda line: line["hazards"]["0"][3],
        "pos-acc 4, T = 1": lambda line: line["hazards"]["1"][3],
        "pos-acc 8, T = 1": lambda line: (line["hazards"]["1"] + 8 * [float("nan")])[7],
    }
    return {
        f"{a} - {b}": {
            name: paired(by_seed(trained, a, value), by_seed(trained, b, value))
            for name, value in measures.items()
        }
        for a, b in pairs
    }


# ---------------------------------------------------------------------------- the head law


def fit_specialist_law(lines: list[dict]) -> HeadLaw:
    """base, drift, spread of the law through what chains of HASS and PosS-n accepted at T = 0."""
    n = np.asarray([UNROLLED[line["arm"]] for line in lines])
    rates = np.asarray([line["chain_hazards"]["0"] for line in lines])
    positions = rates.shape[1]

    def residual(values, _):
        law = HeadLaw(base=values[0], drift=values[1], spread=values[2])
        return jax.vmap(lambda n: law.hazards(positions, specialist_positions=n))(n) - rates

    with jax.enable_x64(True):
        n, rates = jnp.asarray(n), jnp.asarray(rates)
        solver = optimistix.LevenbergMarquardt(rtol=1e-9, atol=1e-9)
        start = jnp.asarray([0.0, 0.2, 0.1])
        values = optimistix.least_squares(residual, solver, start, throw=False).value
    return HeadLaw(base=float(values[0]), drift=float(values[1]), spread=float(values[2]))


def best(table: dict[str, dict[int, float]]) -> tuple[str, int, float]:
    return max(((a, d, v) for a, row in table.items() for d, v in row.items()), key=lambda x: x[2])


def in_company(costs: StepCosts, calibration: dict) -> float:
    """What a speedup loses between steps timed alone and a decoder that runs draft and target in
    turns (they push each other's weights out of the cache): EAGLE's rounds over the sum of its
    steps, relative to autoregression's rounds over its; calibration prompts, median of lookaheads.
    A factor, which heads of other sizes can take; pair_calibration fits a draft's own seconds.
    """
    plain = calibration["autoregression, 0"]["seconds_per_round"] / costs.target[1]
    rounds = [
        calibration[f"EAGLE, {d}"]["seconds_per_round"] / costs.round_seconds("EAGLE", d)
        for d in DEPTHS
    ]
    return float(np.median(rounds) / plain)


def choice(
    costs: StepCosts, hazards: dict[str, np.ndarray], speed: dict, loss: float
) -> dict[str, Any]:
    """Predicted and measured speedup per arm and depth, the best of either, and what the predicted
    best reaches of the measured best. loss: see `in_company`."""
    predicted = {
        arm: {depth: costs.speedup(arm, rates, depth) / loss for depth in DEPTHS}
        for arm, rates in hazards.items()
    }
    plain = speed["autoregression, 0"]["tokens_per_second"]
    measured = {
        arm: {d: speed[f"{arm}, {d}"]["tokens_per_second"] / plain for d in DEPTHS}
        for arm in hazards
    }
    mine, truth = best(predicted), best(measured)
    errors = [abs(predicted[a][d] / measured[a][d] - 1) for a in hazards for d in DEPTHS]
    return {
        "predicted_speedup": predicted,
        "measured_speedup": measured,
        "median_error": float(np.median(errors)),
        "largest_error": float(np.max(errors)),
        "predicted_best": mine,
        "measured_best": truth,
        "measured_at_predicted_over_best": measured[mine[0]][mine[1]] / truth[2],
    }


def head_law(decoded: list[dict], costs: StepCosts, speed: dict) -> dict[str, Any]:
    """The law's coefficients; the K, n and depth it says are best here, and the measured ones.
    Calibrated on other prompts than those whose speed is compared."""
    layered = [line for line in decoded if line["arm"] in LAYERED]
    shape = np.asarray([LAYERED[line["arm"]] for line in layered], float)
    rates = np.asarray([line["chain_hazards"]["0"] for line in layered])
    positions = rates.shape[1]
    law = fit_rate_law(np.zeros(len(layered), int), shape[:, 0], shape[:, 1], rates)
    law = dataclasses.replace(law, base=np.asarray(law.base)[0])
    unrolled = [line for line in decoded if line["arm"] in UNROLLED]
    by_n = fit_specialist_law(unrolled)
    with jax.enable_x64(True):
        of_k = {
            arm: np.asarray(law.hazards(positions, layers=k, adversary=a))
            for arm, (k, a) in LAYERED.items()
        }
        of_n = {
            a: np.asarray(by_n.hazards(positions, specialist_positions=n))
            for a, n in UNROLLED.items()
        }
    n_rates = [np.asarray(line["chain_hazards"]["0"]) for line in unrolled]
    misfit_n = [r - of_n[line["arm"]] for r, line in zip(n_rates, unrolled, strict=True)]
    misfit_k = [r - of_k[line["arm"]] for r, line in zip(rates, layered, strict=True)]
    loss = in_company(costs, speed["calibration"])
    return {
        "layers": {k: float(v) for k, v in vars(law).items()},
        "specialists": {k: float(v) for k, v in vars(by_n).items()},
        "mean_misfit_of_hazards": {
            "layers": float(np.abs(misfit_k).mean()),
            "specialists": float(np.abs(misfit_n).mean()),
        },
        "in_company": loss,
        "K": choice(costs, of_k, speed["measured"], loss),
        "n": choice(costs, of_n, speed["measured"], loss),
    }


# ---------------------------------------------------------------------------- tables


def spread(values: list[float], digits: int = 2) -> str:
    """Mean and half the 95 % interval."""
    half = (values[2] - values[1]) / 2
    return f"{values[0]:.{digits}f}" + (f" ± {half:.{digits}f}" if np.isfinite(half) else "")


def difference(values: list[float]) -> str:
    """A paired difference; without an interval from one seed, nothing where there is none."""
    mean, low, high = values
    if not np.isfinite(low):
        return f"{mean:+.3f}" if np.isfinite(mean) else ""
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" + (" *" if low > 0 or high < 0 else "")


def fastest(speed: dict, name: str) -> tuple[float, int] | None:
    """The best measured tokens per second of a draft and its lookahead; None if not measured."""
    found = [
        (speed[f"{name}, {d}"]["tokens_per_second"], d) for d in DEPTHS if f"{name}, {d}" in speed
    ]
    return max(found) if found else None


def tables(result: dict[str, Any]) -> list[str]:
    """What docs/draft-heads.md shows, as Markdown."""
    speed, costs = result["tokens_per_second"], result["step_seconds"]
    plain = speed["autoregression, 0"]["tokens_per_second"]
    lines = [
        "| head | MB | τ chain, T = 0 | T = 1 | τ static tree, T = 0 | T = 1 "
        "| τ dynamic tree, T = 0 | T = 1 | draft step, ms | tokens/s (lookahead) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = [f"{p}, T = {t}" for p in ("chain", "static tree", "dynamic tree") for t in (0, 1)]
    rows = dict(result["arms"])
    for arm in ("draft_small", *rows):
        known = rows.get(arm) or result["draft_small"]
        taus = [known["tau_decoded"].get(key, "") for key in keys]
        cells = [
            tau if tau == "" else f"{tau:.2f}" if isinstance(tau, float) else spread(tau)
            for tau in taus
        ]
        best = fastest(speed, arm)
        rate = f"{best[0]:.0f} ({best[1]}), ×{best[0] / plain:.2f}" if best else ""
        size = f"{known['bytes_bfloat16'] / 1e6:.1f}" if arm in rows else "0.9"
        step = f"{1e3 * costs['step'][arm]:.3f}"
        cells = [arm, size, *cells, step, rate]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"autoregression: {plain:.0f} tokens/s", ""]
    seeds = {arm: len(known["seeds"]) for arm, known in rows.items()}
    lines += ["Seeds per arm: " + ", ".join(f"{a} {n}" for a, n in seeds.items()), ""]
    for t in ("0", "1"):
        lines += [
            f"| pos-acc, T = {t} | " + " | ".join(map(str, range(1, 9))) + " |",
            "|---" * 9 + "|",
        ]
        for arm, known in rows.items():
            cells = [spread(value) for value in known["pos_acc"][t]]
            lines.append(f"| {arm} | " + " | ".join([*cells, *[""] * (8 - len(cells))]) + " |")
        lines.append("")
    lines += ["| difference | " + " | ".join(next(iter(result["compared"].values()))) + " |"]
    lines += ["|---" * (1 + len(next(iter(result["compared"].values())))) + "|"]
    for pair, values in result["compared"].items():
        cells = [difference(value) for value in values.values()]
        lines.append(f"| {pair} | " + " | ".join(cells) + " |")
    return lines


# ---------------------------------------------------------------------------- figures


def figure_positions(arms: dict[str, Any], path) -> None:
    """pos-acc against position, T = 0 and 1, with intervals over seeds."""
    shown = ("EAGLE", "HASS", "PosS-1", "PosS-2", "PosS-3", "EAGLE-3", "EAGLE K=3", "Medusa K=1")
    later = tuple(arm for arm in arms if arm.startswith("trained "))
    fig, axes = plt.subplots(2, 2, figsize=(9.6, 6.6), layout="constrained", sharey=True)
    panels = [(t, names) for names in (shown, later) for t in ("0", "1")]
    for ax, (t, shown) in zip(axes.flat, panels, strict=True):
        for place, arm in enumerate(a for a in shown if a in arms):
            rows = np.asarray(arms[arm]["pos_acc"][t])
            x = np.arange(1, len(rows) + 1) + 0.05 * (place - 3)
            half = np.nan_to_num(rows[:, 2] - rows[:, 0])
            ax.errorbar(x, rows[:, 0], half, marker="o", ms=3, lw=1, capsize=2, label=arm)
        start = "from a trained head" if shown is later else "from random weights"
        ax.set(title=f"T = {t}, {start}", xlabel="position", ylim=(0, 1))
    for ax in axes[:, 1]:  # the same names left and right; right is room above
        ax.legend(fontsize=7, ncols=3, loc="upper left")
    for ax in axes[:, 0]:
        ax.set_ylabel("pos-acc (chain, held-out)")
    fig.savefig(path, dpi=150)
    plt.close(fig)


def figure_tau(arms: dict[str, Any], small: dict[str, float], path) -> None:
    """Tokens per round of the runtime: chain, static and dynamic tree, T = 0 and 1."""
    names = [arm for arm in arms if arms[arm]["tau_decoded"]]
    fig, axes = plt.subplots(2, 1, figsize=(9.6, 6.0), layout="constrained", sharex=True)
    for ax, t in zip(axes, (0, 1), strict=True):
        for place, policy in enumerate(("chain", "static tree", "dynamic tree")):
            key = f"{policy}, T = {t}"
            rows = np.asarray([arms[arm]["tau_decoded"][key] for arm in names])
            x = np.arange(len(names)) + 0.26 * (place - 1)
            bars = ax.bar(x, rows[:, 0], 0.25, label=policy)
            half = np.nan_to_num(rows[:, 2] - rows[:, 0])
            ax.errorbar(x, rows[:, 0], half, fmt="none", ecolor="0.2", lw=0.8)
            if key in small:
                ax.axhline(small[key], color=bars[0].get_facecolor(), lw=0.8, ls="--")
        ax.set(title=f"T = {t} (dashed: the small draft)", ylabel="tokens per round")
        ax.set_ylim(bottom=1)
    axes[0].legend(fontsize=7)
    axes[1].set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def report(settings) -> None:
    """Everything from the lines in `--work`."""
    trained = lines_of(settings.work / "trained.jsonl")
    decoded = lines_of(settings.work / "decoded.jsonl")
    costs = costs_of(settings)
    speed = json.loads((settings.work / "speed.json").read_text())
    arms = arms_of(trained, decoded)
    small = next((line["tau"] for line in decoded if line["arm"] == "draft_small"), {})
    result = {
        "settings": {
            "updates": settings.updates,
            "further_updates": settings.further,
            "sequences": settings.sequences,
            "held_out": settings.held_out,
            "seeds": sorted({line["seed"] for line in trained}),
            "target": json.loads((settings.pair / "training.json").read_text())["models"]["target"],
        },
        "arms": arms,
        "draft_small": {"tau_decoded": small},
        "compared": compared(trained),
        "step_seconds": dataclasses.asdict(costs),
        "tokens_per_second": speed["measured"],
        "tokens_per_second_calibration": speed["calibration"],
        "head_law": head_law(decoded, costs, speed),
        "training_seconds_in_all": sum(line["seconds"] for line in trained),
        "provenance": provenance(0),
    }
    settings.results.mkdir(parents=True, exist_ok=True)
    path = settings.results / "draft_heads.json"
    path.write_text(json.dumps(to_data(result), indent=1) + "\n")
    figure_positions(arms, settings.results / "draft_heads_positions.png")
    figure_tau(arms, small, settings.results / "draft_heads_tau.png")
    text = "\n".join(
        ["# Draft heads, measured", "", "Written by `python -m experiments.draft_heads`; ± and "
         "brackets: 95 % over seeds (Student's t), * where zero lies outside.", "",
         *tables(result)]
    )  # fmt: skip
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(text)
    print(json.dumps(result["head_law"], indent=1))
    say(f"{path}, its tables and two figures")
