"""Heads and verification: laws recovered, the papers' tables, regimes, derivatives."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.theory import heads
from sdx.theory.architectures import load_architecture
from sdx.theory.hardware import load_hardware
from sdx.theory.trees import LogAAT
from sdx.theory.verification import (
    TwoLineRoofline,
    effective_performance,
    optimal_verification_length,
    verification_schedule,
)

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
LAW = heads.HeadLaw(
    base=1.6, layers=0.2, adversary=0.1, temperature=0.3, boost=0.25, drift=0.4, spread=0.3
)


# ---------------------------------------------------------------------------- acceptance of heads


def test_length_is_the_chain_rule_of_hazards():
    rates = np.asarray(heads.head_acceptance(LAW, 4, specialist_positions=2.0).rates)
    expected = 1 + np.cumprod(rates).sum()
    np.testing.assert_allclose(
        heads.head_length(LAW, 4, specialist_positions=2.0), expected, rtol=1e-12
    )
    half = 0.5 * sum(float(heads.head_length(LAW, d)) for d in (3, 4))
    np.testing.assert_allclose(heads.head_length(LAW, 3.5), half, rtol=1e-12)


def test_more_layers_specialists_and_adversary_help_and_temperature_hurts():
    plain = float(heads.head_length(LAW, 6))
    for better in (
        {"layers": 2.0},
        {"adversary": 1.0},
        {"specialist_positions": 3.0},
        {"nodes": 80.0},
    ):
        assert float(heads.head_length(LAW, 6, **better)) > plain, better
    one, two = (float(heads.head_length(LAW, 6, specialist_positions=n)) for n in (1.0, 2.0))
    assert one > two > plain
    assert float(heads.head_length(LAW, 6, temperature=1.0)) < plain


def test_fits_recover_the_laws_that_made_the_data():
    depth, nodes, n, hot = (
        g.ravel() for g in np.meshgrid([4.0, 6, 9], [60.0, 80], [0.0, 1, 3], [0.0, 1])
    )
    length = np.array(
        [
            float(heads.head_length(LAW, d, nodes=x, specialist_positions=m, temperature=t))
            for d, x, m, t in zip(depth, nodes, n, hot, strict=True)
        ]
    )
    names = ("base", "temperature", "boost", "drift", "spread")
    fit = lambda lengths: heads.fit_length_law(depth, nodes, n, hot, lengths)  # noqa: E731
    with jax.enable_x64(True):
        error = 1e-2 * length * np.cos(np.arange(length.size))
        found, slope = jax.jvp(fit, (jnp.asarray(length),), (jnp.asarray(error),))
        low, high = (fit(length + sign * 1e-3 * error) for sign in (-1, 1))
    for name in names:
        np.testing.assert_allclose(getattr(found, name), getattr(LAW, name), rtol=1e-5)
        difference = (float(getattr(high, name)) - float(getattr(low, name))) / 2e-3
        np.testing.assert_allclose(getattr(slope, name), difference, rtol=1e-5, atol=1e-9)
    cost = heads.HeadCost(verify=1.1, draft_step=0.06, tokens_step=0.08, switch=0.01, sampling=0.03)
    used = np.maximum(np.ceil(depth / np.where(n > 0, n, 99)), 1)
    speedup = np.asarray(cost.speedup(length, depth, nodes, used, hot))
    refound = heads.fit_head_cost(length, speedup, depth, nodes, used, hot)
    for name, value in vars(cost).items():
        np.testing.assert_allclose(getattr(refound, name), value, rtol=1e-7)


def test_rate_law_recovers_layers_and_adversary():
    target, layers, adversary = np.array([0, 0, 0, 1, 1, 1]), [1, 2, 3] * 2, [0, 0, 1, 0, 1, 0]
    rates = [
        1 / (1 + np.exp(-(1.0 + 0.2 * t + 0.3 * np.log(k) + 0.1 * a - 0.4 * np.log([1, 2, 3]))))
        for t, k, a in zip(target, layers, adversary, strict=True)
    ]
    law = heads.fit_rate_law(target, layers, adversary, np.array(rates))
    np.testing.assert_allclose(law.base, [1.0, 1.2], rtol=1e-5)
    found = [float(v) for v in (law.layers, law.adversary, law.drift, law.spread)]
    np.testing.assert_allclose(found, [0.3, 0.1, 0.4, 0.0], atol=1e-5)


def test_specialists_used():
    np.testing.assert_allclose(heads.specialists_used(6.0, [0.0, 1.0, 3.0, 20.0]), [1, 6, 2, 1])


@pytest.mark.parametrize("without", [0, 1])
def test_layer_cost_interval_is_where_the_printed_best_wins(without):
    lengths = {1: 2.62, 2: 2.82, 3: 2.87}
    low, high = heads.layer_cost_interval(lengths, 2, without)
    for y, best in ((low * 0.99, 3), (low * 1.01, 2), (high * 0.99, 2), (high * 1.01, 1)):
        speed = {k: v / (1 + y * (k - without)) for k, v in lengths.items()}
        assert max(speed, key=speed.get) == best
    assert heads.layer_cost_interval({1: 2.0, 2: 2.1}, 1, 1) == (pytest.approx(0.05), np.inf)


def test_poss_and_koala_results_hold_their_bounds():
    result = json.loads((RESULTS / "heads_fit.json").read_text(encoding="utf-8"))
    poss = result["poss"]["summary"]
    assert poss["cells"] == 128 and poss["mean_error"] <= 0.008
    assert poss["held_out_worst_method"] <= 0.02
    assert poss["best_depth_rows"] >= 31 and poss["least_share"] >= 0.995
    for part in ("per_layer_of_K", "per_layer_beyond_1"):
        koala = result["koala"][part]
        low, high = koala["all_six"]
        assert low < koala["fitted_y"] < high
        assert koala["held_out_T1"]["eagle_best_at_fitted_y"] == 1
        assert koala["held_out_T1"]["medusa_best_at_fitted_y"] >= 2


# ---------------------------------------------------------------------------- verification

AAT = LogAAT(A=1.75, B=0.7, C=1.0)


def accelerator(**changes):
    values = dict(
        weight_bytes=20e9,
        context_bytes=2.8e6,
        kappa_token=33.0,
        kappa_context=9e-4,
        draft_ratio=0.1,
        draft_exponent=1.5,
        draft_context_bytes=4.7e6,
    )
    return TwoLineRoofline(**{**values, **changes})


def choose(roofline, elements, bandwidth, longest=64):
    x = np.arange(1.0, longest + 1)
    return optimal_verification_length(
        AAT,
        roofline.verify_seconds(x, 1024.0, elements, bandwidth),
        roofline.draft_seconds(x, 1024.0, bandwidth),
    )


def test_compute_bound_from_the_first_token_never_pays():
    choice = choose(accelerator(draft_ratio=1e-6), elements=100.0, bandwidth=819e9)
    assert (choice.regime, choice.verdict, choice.length) == ("compute", "do not speculate", 1)
    assert choice.speedup == 1


def test_memory_bound_throughout_wants_the_longest():
    roofline = accelerator(draft_ratio=1e-3, draft_exponent=1.0)
    choice = choose(roofline, elements=1e9, bandwidth=819e9)
    assert (choice.regime, choice.verdict, choice.length) == ("memory", "speculate", 64)
    assert choice.speedup > float(AAT.aat(64.0)) / 1.5


def test_in_between_the_optimum_sits_at_the_ridge():
    choice = choose(accelerator(draft_exponent=1.0), elements=64 * 48.0, bandwidth=460e9)
    assert choice.regime == "mixed" and choice.verdict == "speculate"
    assert abs(choice.length - choice.ridge) <= 1


def test_schedule_over_contexts_follows_the_roofline_of_a_real_device():
    choices = verification_schedule(
        AAT, load_architecture("llama-3-8b"), load_hardware("u280"), (256, 16384), 24
    )
    assert set(choices) == {256, 16384}
    for choice in choices.values():
        assert 1 <= choice.length <= 24 and choice.speedup >= 1


def test_fpga_results_hold_their_bounds():
    result = json.loads((RESULTS / "fpga_fit.json").read_text(encoding="utf-8"))
    assert result["memory_line"]["mean_error"] < 6e-4
    log = result["log"]
    assert log["mean_error"] <= 0.025 and log["largest_error"] <= 0.08
    assert log["best_length_within_1"] >= 11 and log["of_cells"] == 12
    assert log["least_share_of_maximum"] >= 0.97 and 1.5 <= log["aat_2"] <= 2
    assert set(log["leave_one_board_out"]) == {"U280", "VHK158", "V80", "U250"}
    # The committed parameters give the committed figures back.
    law = LogAAT(**{k: log["parameters"][k] for k in "ABC"})
    rest = {k: v for k, v in log["parameters"].items() if k not in "ABC"}
    x, context, elements, bandwidth = 13.0, 128.0, 128.0 * 128, 819e9
    roofline = TwoLineRoofline(**rest)
    speed = effective_performance(
        law,
        x,
        roofline.verify_seconds(x, context, elements, bandwidth),
        roofline.draft_seconds(x, context, bandwidth),
    )
    np.testing.assert_allclose(speed, 98.96, rtol=log["largest_error"])


# ---------------------------------------------------------------------------- derivatives


def head_case(v):
    law = heads.HeadLaw(
        base=v[0],
        layers=v[1],
        adversary=v[2],
        temperature=v[3],
        boost=v[4],
        drift=v[5],
        spread=v[6],
    )
    head = dict(
        layers=v[7], specialist_positions=v[8], adversary=v[9], temperature=v[10], nodes=v[11]
    )
    cost = heads.HeadCost(verify=v[13], draft_step=v[14], tokens_step=0.1, switch=v[15])
    length = heads.head_length(law, v[12], **head)
    used = heads.specialists_used(v[12], v[8])
    return (
        cost.speedup(length, v[12], v[11], used, v[10])
        + heads.head_acceptance(law, 3, **head).rates.sum()
    )


def verification_case(v):
    roofline = TwoLineRoofline(**dict(zip(vars(accelerator()), v[:7] * SCALES, strict=True)))
    law = LogAAT(A=v[7], B=v[8], C=v[9])
    x, context, elements, bandwidth = v[10], 1000 * v[11], 3000 * v[12], 1e11 * v[13]
    return effective_performance(
        law,
        x,
        roofline.verify_seconds(x, context, elements, bandwidth),
        roofline.draft_seconds(x, context, bandwidth),
    )


def fit_case(v):
    cost = heads.fit_head_cost(v[:8], v[8:], DEPTH, NODES, USED, HOT)
    return cost.speedup(4.0, 5.0, 70.0, 2.0, 0.5)


def rate_law_case(v):
    law = heads.fit_rate_law(
        np.array([0, 0, 0, 1]), [1.0, 2, 1, 2], [0.0, 0, 1, 1], v.reshape(4, 3)
    )
    return law.drift + law.layers + law.base[1]


SCALES = jnp.array([1e9, 1e6, 1.0, 1e-3, 1.0, 1.0, 1e6])
DEPTH, NODES = np.array([4.0, 5, 6, 7, 4, 5, 6, 7]), np.array([60.0, 80] * 4)
USED, HOT = np.array([1.0, 2, 3, 1, 2, 3, 1, 2]), np.array([0.0, 0, 0, 0, 1, 1, 1, 1])
LENGTHS = 3.9 + 0.1 * np.sin(np.arange(8.0))
HEAD = [1.6, 0.2, 0.1, 0.3, 0.25, 0.4, 0.3, 1.7, 2.3, 0.4, 0.6, 72.0, 5.4, 1.1, 0.06, 0.01]
CASES = {
    "heads": (head_case, HEAD),
    "verification": (
        verification_case,
        [20, 2.8, 33, 0.9, 0.1, 1.5, 4.7, 1.75, 0.7, 1.0, 8.3, 1.1, 1.2, 4.6],
    ),
    "fit_rate_law": (
        rate_law_case,
        [0.57, 0.4, 0.31, 0.59, 0.41, 0.32, 0.58, 0.42, 0.33, 0.6, 0.44, 0.33],
    ),
    "fit_head_cost": (fit_case, np.concatenate([LENGTHS, LENGTHS / (1.2 + 0.07 * DEPTH)])),
}
LIMITS = {
    "heads": [
        [base, *HEAD[1:7], 1.0, n, 0.0, 0.0, nodes, depth, *HEAD[13:]]
        for base in (-40.0, 40.0)
        for n in (0.0, 1.0, 1e4)
        for nodes, depth in ((1.0, 0.0), (1e4, 32.0))
    ]
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_limits(name):
    function, point = CASES[name]
    point = np.array(point, np.float64)
    n, h = len(point), 1e-6 * np.maximum(1.0, np.abs(point))
    with jax.enable_x64(True):
        both = jax.jit(jax.vmap(jax.value_and_grad(function)))
        batch = np.concatenate([[point], point + np.diag(h), point - np.diag(h)])
        batch = np.concatenate([batch, *([LIMITS[name]] if name in LIMITS else [])])
        value, slope = (np.asarray(part) for part in both(jnp.asarray(batch)))
    expected = (value[1 : n + 1] - value[n + 1 : 2 * n + 1]) / (2 * h)
    np.testing.assert_allclose(slope[0], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert np.isfinite(value).all() and np.isfinite(slope).all()


def test_errors_name_value_and_remedy():
    with pytest.raises(ValueError, match="one entry per length"):
        optimal_verification_length(AAT, [1.0, 2.0], [0.0])
