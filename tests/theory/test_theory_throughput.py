"""The objective: chains on abstract costs, rooflines and step tables; no false wins."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from central_differences import assert_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from sdx.records import Autoregressive, Chain, Design, DrafterSpec, Workload
from sdx.theory.acceptance import BetaMixture, Geometric, expected_tokens
from sdx.theory.hardware import Hardware, step_seconds, step_table
from sdx.theory.scaling import optimal_lookahead
from sdx.theory.throughput import FlopsCost, LeviathanCost, SdslCost, objective, predict
from sdx.theory.transformers import llama_like

HARDWARE = Hardware(
    peak_flops_per_second={"bfloat16": 400e12},
    memory_bandwidth_bytes_per_second=2e12,
    memory_capacity_bytes=80e9,
    layer_overhead_seconds=4e-6,
    step_overhead_seconds=3e-5,
    interconnect_bandwidth_bytes_per_second=300e9,
    watts=500.0,
    dollars_per_hour=2.0,
    name="test",
)
TARGET = llama_like(32.0, 4096.0, 32000.0, name="target")


def chain(gamma, **spec):
    return Design(
        drafter=DrafterSpec(layers=4.0, width=1024.0, **spec), policy=Chain(lookahead=gamma)
    )


def abstract(gamma, cost, alpha):
    return predict(chain(gamma), Workload(), None, cost, Geometric(alpha=alpha))


def test_what_no_integer_wins_is_not_reported_as_a_win():
    p = abstract(optimal_lookahead(0.6, 1 / 1.05), LeviathanCost(cost_ratio=1 / 1.05), 0.6)
    assert f"{float(p.speedup):.3f}" == "1.000"
    assert p.verdict == "do not speculate"


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 0.98), st.floats(1e-4, 1.5), st.floats(0.0, 30.0))
def test_never_a_win_that_no_integer_has(alpha, ratio, gamma):
    p = abstract(gamma, LeviathanCost(cost_ratio=ratio), alpha)
    integers = np.arange(0.0, 32.0)
    best = ((1 - alpha ** (integers + 1)) / (1 - alpha) / (1 + ratio * integers)).max()
    assert float(p.speedup) <= best * (1 + 1e-12)
    assert (p.verdict == "speculate") == (float(p.speedup) > 1 + 1e-12)
    if best <= 1:
        assert p.verdict == "do not speculate"


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 0.95), st.floats(0.2, 4.0), st.floats(0.0, 12.0), st.integers(0, 10_000))
def test_never_a_win_that_no_integer_has_on_measured_steps(alpha, a, gamma, seed):
    """Steps of random jagged tables: mixing two lookaheads is never better than both."""
    rng = np.random.default_rng(seed)
    tokens = np.arange(1.0, 15.0)
    seconds = 1e-3 * (1 + np.cumsum(rng.exponential(0.15, 14)))[None, :, None]
    table = step_table([1.0], tokens, [0.0], seconds)
    draft = step_table([1.0], [1.0], [0.0], [[[1e-4 * a]]])
    law = BetaMixture(a=a, b=a * (1 - alpha) / alpha)

    def speedup(gamma):
        return float(
            predict(
                chain(gamma), Workload(), None, table, law, TARGET, draft_hardware=draft
            ).speedup
        )

    low = np.floor(gamma)
    assert speedup(gamma) <= max(speedup(low), speedup(low + 1.0)) * (1 + 1e-12)


def test_abstract_costs_are_the_papers_formulas():
    alpha, gamma, N, M = 0.7, 4.0, 1e8, 1e10
    tokens = (1 - alpha**5) / (1 - alpha)
    sdsl = abstract(gamma, SdslCost(N=N, M=M), alpha)
    assert float(sdsl.tokens_per_second) == pytest.approx(tokens / (2 * (M + gamma * N)))
    flops = abstract(gamma, FlopsCost(N=N, M=M), alpha)
    assert float(flops.tokens_per_second) == pytest.approx(tokens / (2 * (5 * M + gamma * N)))
    assert flops.verdict == "do not speculate"  # per FLOP speculation never pays
    c = 0.05
    leviathan = abstract(gamma, LeviathanCost(cost_ratio=c), alpha)
    assert float(leviathan.speedup) == pytest.approx(tokens / (gamma * c + 1))


def test_roofline_round_is_its_steps():
    work, design = Workload(batch=4.0, context=2048.0), chain(5)
    p = predict(design, work, TARGET, HARDWARE, Geometric(alpha=0.7))
    draft = llama_like(4.0, 1024.0, 32000.0)
    draft_step = float(step_seconds(draft, HARDWARE, 4.0, 1.0, 2048.0))
    verify = float(step_seconds(TARGET, HARDWARE, 4.0, 6.0, 2048.0))
    tokens = float(expected_tokens(Geometric(alpha=0.7), 5.0))
    assert float(p.draft_seconds) == pytest.approx(5 * draft_step)
    assert float(p.verify_seconds) == pytest.approx(verify)
    assert float(p.tokens_per_second) == pytest.approx(4 * tokens / (5 * draft_step + verify))
    baseline = 4 / float(step_seconds(TARGET, HARDWARE, 4.0, 1.0, 2048.0))
    assert float(p.speedup) == pytest.approx(float(p.tokens_per_second) / baseline)
    assert float(p.joules_per_token) == pytest.approx(500.0 / float(p.tokens_per_second))
    assert bool(p.fits_in_memory)
    crowded = dataclasses.replace(work, batch=4096.0, context=1e5)
    assert not bool(predict(design, crowded, TARGET, HARDWARE, Geometric(alpha=0.7)).fits_in_memory)


def test_overhead_and_autoregression():
    work, law = Workload(), Geometric(alpha=0.7)
    p = predict(chain(3), work, TARGET, HARDWARE, law, round_overhead_seconds=1e-3)
    free = predict(chain(3), work, TARGET, HARDWARE, law)
    assert float(p.overhead_seconds) == 1e-3
    assert float(p.tokens_per_second) < float(free.tokens_per_second)
    alone = Design(drafter=DrafterSpec(), policy=Autoregressive())
    alone = predict(alone, work, TARGET, HARDWARE, law, round_overhead_seconds=1e-3)
    assert float(alone.speedup) == 1.0 and alone.verdict == "do not speculate"
    none = predict(chain(0), work, TARGET, HARDWARE, law, round_overhead_seconds=1e-3)
    assert float(none.speedup) == pytest.approx(1.0)


def test_drafters_without_a_network_of_their_own():
    work, law = Workload(), Geometric(alpha=0.6)
    seconds = {
        family: float(predict(chain(4, family=family), work, TARGET, HARDWARE, law).draft_seconds)
        for family in ("ngram", "medusa", "eagle", "independent")
    }
    assert seconds["ngram"] == 0.0
    assert 0 < seconds["medusa"] < seconds["eagle"]  # one pass against four


def test_static_batches_lose_and_continuous_ones_do_not():
    law = Geometric(alpha=0.7)
    rates = {
        mode: float(
            predict(
                chain(4), Workload(batch=8.0, batching=mode), TARGET, HARDWARE, law
            ).tokens_per_second
        )
        for mode in ("continuous", "static")
    }
    assert 0.8 < rates["static"] / rates["continuous"] < 0.99


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(workload=Workload(batch=-1.0)), "batch = -1 must be positive"),
        (dict(acceptance=Geometric(alpha=1.2)), r"alpha = 1.2 must lie inside \(0, 1\)"),
        (dict(acceptance=BetaMixture(a=0.0, b=1.0)), "needs a, b > 0"),
        (dict(design=chain(-2.0)), "lookahead = -2"),
        (dict(hardware=SdslCost(N=2e9, M=1e9)), "must lie below the target's"),
        (dict(draft=llama_like(64.0, 4096.0, 32000.0)), "must lie below the target's"),
        (dict(workload=Workload(context=-5.0)), "context = -5"),
    ],
)
def test_bad_input_is_one_clear_line(change, words):
    arguments = dict(
        design=chain(3),
        workload=Workload(),
        target=TARGET,
        hardware=HARDWARE,
        acceptance=Geometric(alpha=0.7),
    )
    with pytest.raises(ValueError, match=words) as error:
        predict(**(arguments | change))
    assert "\n" not in str(error.value)


def test_gradient_with_respect_to_everything():
    def rate(x):
        design = Design(drafter=DrafterSpec(layers=x[0], width=x[1]), policy=Chain(lookahead=x[2]))
        work = Workload(batch=x[3], context=x[4])
        hardware = dataclasses.replace(HARDWARE, memory_bandwidth_bytes_per_second=x[5] * 1e12)
        p = objective(design, work, TARGET, hardware, Geometric(alpha=x[6]))
        return p.tokens_per_second + 1e3 * p.joules_per_token

    assert_gradient(rate, [4.0, 1024.0, 4.5, 8.0, 2000.0, 2.0, 0.7])
    with jax.enable_x64(True):
        grad = jax.grad(
            lambda h: (
                predict(chain(4.0), Workload(), TARGET, h, Geometric(alpha=0.7)).tokens_per_second
            )
        )(jax.tree.map(jnp.float64, HARDWARE))
    assert isinstance(grad, Hardware) and float(grad.memory_bandwidth_bytes_per_second) > 0


def test_vmaps_over_designs():
    with jax.enable_x64(True):
        rates = jax.vmap(
            lambda g: (
                objective(chain(g), Workload(), TARGET, HARDWARE, Geometric(alpha=0.7)).speedup
            )
        )(jnp.arange(1.0, 5.0))
    one = predict(chain(3.0), Workload(), TARGET, HARDWARE, Geometric(alpha=0.7)).speedup
    assert float(np.asarray(rates)[2]) == pytest.approx(float(one), rel=1e-12)
