"""Every public function of theory has its gradient checked: here, or in the test named here.

A function that is added without a place in one of the three lists fails `test_no_function_is_left`.
"""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sdx.theory
from sdx.records import DrafterSpec, StaticTree, Workload
from sdx.theory import acceptance, costs, hardware, numerics, rounds, scaling, transformers
from sdx.theory.hardware import Hardware
from sdx.theory.trees import base
from sdx.theory.trees.geometric import GeometricRanks

DEVICE = Hardware(
    peak_flops_per_second={"bfloat16": 400e12},
    memory_bandwidth_bytes_per_second=2e12,
    memory_capacity_bytes=80e9,
    watts=500.0,
    dollars_per_hour=2.0,
)


def net(v):
    return transformers.llama_like(4.0 * v[0], 512.0 * v[1], 32000.0)


def mixture(v):
    """A mixture of experts: the routing of llama_like's kind with experts in its layers."""
    a = transformers.load_architecture("mixtral-8x7b")
    return transformers.experts_touched(a, 3.0 * v[0])


def device(v):
    changed = dict(memory_bandwidth_bytes_per_second=2e12 * v[2], on_chip_memory_bytes=4e7 * v[3])
    return Hardware(**{**vars(DEVICE), **changed})


WORK = Workload(batch=4.0, context=512.0)


def static_tree(v):
    q = jnp.array([0.6, 0.2]) * v[0]
    setting = rounds.Setting(DrafterSpec(), 1.0, WORK, net(v), device(v), q, net(v), device(v))
    found = rounds.static_tree_round(StaticTree(parents=(-1, -1, 0)), setting)
    return found.tokens / (found.draft_seconds + found.verify_seconds)


def fitted(v):
    x = jnp.array([12.0, 15.0, 19.0, 24.0, 30.0])
    fit = scaling.fit_perplexity_law(x * v[0], 0.8 - 0.01 * x * v[1] + 0.002 * jnp.cos(x))
    return fit.law.alpha(jnp.asarray(17.0), jnp.asarray(8.0))


# Name of the function -> a scalar of v = (1, 1, 1, 1), which scales what it depends on.
CASES = {
    "acceptance.hazards": lambda v: acceptance.hazards(
        acceptance.BetaMixture(a=2.0 * v[0], b=v[1]), 4
    ).sum(),
    "acceptance.chain_survival": lambda v: acceptance.chain_survival(
        acceptance.Geometric(alpha=0.6 * v[0]), 2.5 * v[1], 5
    ).sum(),
    "acceptance.static_efficiency": lambda v: acceptance.static_efficiency(
        jnp.array([1.0, 0.6, 0.3]) * v[0], 8.0 * v[1], 128.0 * v[2]
    ),
    "costs.medusa_seconds": lambda v: costs.medusa_seconds(
        device(v), net(v), 4.0 * v[3], 3.0 * v[0], 1.0, "bfloat16"
    ),
    "costs.draft_seconds": lambda v: costs.draft_seconds(
        DrafterSpec(), net(v), net(v), device(v), WORK, 3.0 * v[0], 2.0
    ),
    "costs.draft_pass_seconds": lambda v: costs.draft_pass_seconds(
        net(v), device(v), WORK, 2.0 * v[3], 2.0
    ),
    "costs.verify_seconds": lambda v: costs.verify_seconds(net(v), device(v), WORK, 5.0 * v[3]),
    "hardware.linear_seconds": lambda v: (
        hardware.linear_seconds(device(v), 1e12 * v[0], 4e9 * v[1]).seconds
    ),
    "hardware.attention_seconds": lambda v: (
        hardware.attention_seconds(device(v), 1e12 * v[0], 4e9 * v[1]).seconds
    ),
    "hardware.step_breakdown": lambda v: (
        hardware.step_breakdown(
            net(v), device(v), 4.0 * v[0], 3.0, 512.0, 1.0, None, 2e7 * v[3]
        ).seconds
    ),
    "hardware.memory_required_bytes": lambda v: hardware.memory_required_bytes(
        net(v), 4.0 * v[2], 512.0 * v[3], 2.0
    ),
    "hardware.energy_joules": lambda v: hardware.energy_joules(device(v), 0.1 * v[0], 2.0 * v[1]),
    "hardware.price_dollars": lambda v: hardware.price_dollars(device(v), 0.1 * v[0], 2.0 * v[1]),
    "numerics.geometric_sum": lambda v: numerics.geometric_sum(-0.3 * v[0], 4.0 * v[1]),
    "numerics.safe_log": lambda v: numerics.safe_log(0.4 * v[0]),
    "numerics.safe_divide": lambda v: numerics.safe_divide(v[0], 3.0 * v[1]),
    "rounds.static_tree_round": static_tree,
    "rounds.rank_table": lambda v: rounds.rank_table(
        acceptance.BetaMixture(a=2.0 * v[0], b=v[1]), 3, 1
    ).sum(),
    "rounds.tree_outcome": lambda v: rounds.tree_outcome(
        GeometricRanks(alpha=0.6 * v[0]), 9.3 * v[1], 3.0
    )[0],
    "scaling.fit_perplexity_law": fitted,
    "scaling.delta_method": lambda v: (
        scaling.delta_method(
            lambda c: c[0] ** 2 * c[1], jnp.array([1.0, 2.0]) * v[0], 0.01 * v[1] * jnp.eye(2)
        ).high
    ),
    "transformers.parameters": lambda v: transformers.parameters(net(v)),
    "transformers.active_parameters": lambda v: transformers.active_parameters(net(v)),
    "transformers.weight_bytes": lambda v: transformers.weight_bytes(net(v)),
    "transformers.kv_cache_bytes": lambda v: transformers.kv_cache_bytes(
        net(v), v[2], 512.0 * v[3]
    ),
    "transformers.experts_touched": mixture,
    "transformers.step_flops": lambda v: transformers.step_flops(net(v), v[2], 3.0 * v[3], 512.0),
    "transformers.step_bytes": lambda v: transformers.step_bytes(net(v), v[2], 3.0 * v[3], 512.0),
    "trees.base.acceptance_table": lambda v: base.acceptance_table(v[:2], 2).sum(),
    "trees.base.node_scores": lambda v: base.node_scores((-1, 0, 0), 0.3 * v.reshape(2, 2)).sum(),
}

# Checked in the named test, on its own points and limits.
ELSEWHERE = {
    "acceptance.expected_tokens": "acceptance.test_gradients",
    "acceptance.survival": "acceptance.test_gradients",
    "acceptance.expected_tokens_over_requests": "acceptance.test_requests_average_harmonically",
    "acceptance.static_batch_efficiency": "acceptance.test_static_batch_gradient",
    "architectures.llama_like": "throughput.test_gradient_with_respect_to_everything",
    "cascades.cascade": "cascades.test_gradient_and_limits",
    "cascades.soft_cascade": "cascades.test_gradient_and_limits",
    "cascades.threshold_cascade": "cascades.test_gradient_and_limits",
    "cascades.cascade_of_passes": "rounds.test_gradient_of_the_objective",
    "hardware.step_seconds": "hardware.test_gradients_match_central_differences",
    "heads.head_acceptance": "heads.test_gradient_and_limits",
    "heads.head_length": "heads.test_gradient_and_limits",
    "heads.specialists_used": "heads.test_gradient_and_limits",
    "heads.fit_head_cost": "heads.test_gradient_and_limits",
    "heads.fit_rate_law": "heads.test_gradient_and_limits",
    "heads.fit_length_law": "heads.test_fits_recover_the_laws_that_made_the_data",
    "numerics.lambertw_gap": "numerics.test_lambertw_derivatives",
    "numerics.lambertw_m1_log": "numerics.test_lambertw_derivatives",
    "numerics.expm1_ratio": "numerics.test_expm1_ratio",
    "numerics.p_norm_maximum": "numerics.test_p_norm_maximum_limits_and_gradient",
    "numerics.soft_maximum": "numerics.test_soft_maximum_cools_to_the_maximum",
    "numerics.renewal": "thresholds.test_gradient_and_limits",
    "rounds.chain_round": "throughput.test_gradient_with_respect_to_everything",
    "rounds.threshold_round": "rounds.test_gradient_of_the_objective",
    "rounds.dynamic_tree_round": "rounds.test_gradient_of_the_objective",
    "rounds.cascade_round": "rounds.test_gradient_of_the_objective",
    "rounds.cascade_costs": "rounds.test_gradient_of_the_objective",
    "rounds.round_of": "rounds.test_gradient_of_the_objective",
    "scaling.loss": "scaling.test_loss_laws",
    "scaling.acceptance_of_perplexity": "scaling.test_acceptance_laws_and_their_gradient",
    "scaling.acceptance_of_size": "scaling.test_acceptance_laws_and_their_gradient",
    "scaling.optimal_lookahead": "scaling.test_lookahead_gradient",
    "scaling.sdsl_throughput": "scaling.test_throughput_at_its_limits",
    "scaling.optimal_draft_size": "scaling.test_optimum_is_stationary_and_differentiable",
    "scaling.optimal_draft_interval": "scaling.test_the_intervals_ends_have_exact_slopes",
    "thresholds.threshold_chain": "thresholds.test_gradient_and_limits",
    "thresholds.capped_threshold_chain": "rounds.test_gradient_of_the_objective",
    "thresholds.threshold_tree": "thresholds.test_gradient_and_limits",
    "thresholds.fit_calibration": "thresholds.test_gradient_and_limits",
    "thresholds.reliability": "thresholds.test_gradient_and_limits",
    "throughput.objective": "throughput.test_gradient_with_respect_to_everything",
    "throughput.predict": "throughput.test_gradient_with_respect_to_everything",
    "transformers.step_operations": "transformers.test_gradients_match_central_differences",
    "trees.aat.fit_aat": "trees.test_gradient_against_central_differences",
    "trees.aat.r_squared": "trees.test_gradient_against_central_differences",
    "trees.base.expected_tokens_of_tree": "trees.test_gradient_against_central_differences",
    "trees.exact.tree_profile": "trees.test_gradient_against_central_differences",
    "trees.soft.soft_tree": "trees.test_gradient_against_central_differences",
    "verification.effective_performance": "heads.test_gradient_and_limits",
}

# No number in, or no number out, or an argument of the maximum: nothing to differentiate.
WITHOUT = {
    "architectures.preset_names", "architectures.nearest", "architectures.load_architecture",
    "architectures.architecture_from_config", "cascades.held_limits", "costs.draft_architecture",
    "hardware.peak_flops_per_second", "hardware.step_table", "hardware.require_fit",
    "hardware.device_names", "hardware.load_hardware", "hardware.hardware_from_dict",
    "hardware.hardware_to_toml", "heads.layer_cost_interval",
    "numerics.float64", "scaling.student_t",
    "throughput.is_concrete", "trees.base.structure", "trees.base.concrete_table",
    "trees.base.along", "trees.builders.maximal_tree", "trees.builders.width_based_tree",
    "trees.builders.depth_based_tree", "trees.builders.prior_score_tree",
    "trees.exact.is_monotone", "trees.exact.greedy_tree", "trees.exact.optimal_tree",
    "trees.soft.candidate_tree", "verification.optimal_verification_length",
    "verification.verification_schedule",
}  # fmt: skip


def public_functions() -> set[str]:
    found = set()
    for info in pkgutil.walk_packages(sdx.theory.__path__, "sdx.theory."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == info.name
            if own and not name.startswith("_") and inspect.isroutine(inspect.unwrap(value)):
                found.add(f"{info.name.removeprefix('sdx.theory.')}.{name}")
    return found


def test_no_function_is_left():
    lists = [set(CASES), set(ELSEWHERE), WITHOUT]
    assert public_functions() == set.union(*lists)
    assert sum(map(len, lists)) == len(set.union(*lists))


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_named_test_speaks_of_the_function(test):
    file, name = test.split(".")
    text = (Path(__file__).parent / f"test_theory_{file}.py").read_text()
    assert f"def {name}(" in text
    inner = {"renewal", "head_acceptance", "cascade_of_passes", "capped_threshold_chain"}
    for function in (f for f, t in ELSEWHERE.items() if t == test):
        short = function.rsplit(".", 1)[1]
        # The rooms below the objective are reached through it.
        reached = short in inner or function.startswith("rounds.")
        assert reached or re.search(rf"\b{short}\b", text), function


@pytest.mark.parametrize("room", sorted({name.split(".")[0] for name in CASES}))
def test_gradients_against_central_differences(room):
    """Every function of a room relative to its own slopes."""
    point, h = np.array([1.0, 0.97, 1.03, 0.99]), 1e-5
    batch = np.concatenate([[point], point + h * np.eye(4), point - h * np.eye(4)])
    for name, function in CASES.items():
        if not name.startswith(room + "."):
            continue
        with jax.enable_x64(True):
            both = jax.jit(jax.vmap(jax.value_and_grad(function)))
            value, slope = (np.asarray(part) for part in both(jnp.asarray(batch)))
        expected = (value[1:5] - value[5:]) / (2 * h)
        scale = np.abs(expected).max()
        assert scale > 0, name
        np.testing.assert_allclose(slope[0], expected, rtol=0, atol=1e-6 * scale, err_msg=name)
