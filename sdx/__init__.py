"""sdx: design speculative decoding by gradient, run it losslessly, compare with measurement.

    >>> import sdx
    >>> sdx.optimal_draft_size(70e9, 18e12, 15e12).N

The public names; each is loaded when it is first asked for, so that theory does not wait for
networks and `sdx --help` for neither.
"""

import importlib

_HOMES = {
    "sdx.records": (
        "Autoregressive", "Cascade", "Chain", "Design", "DrafterSpec", "DynamicTree", "Interval",
        "Measurement", "Prediction", "Sampling", "StaticTree", "ThresholdChain", "Workload",
    ),
    "sdx.theory.numerics": ("lambertw_gap", "lambertw_m1_log", "renewal"),
    "sdx.theory.acceptance": ("BetaMixture", "Geometric", "PerPosition", "expected_tokens"),
    "sdx.theory.scaling": ("optimal_draft_size", "optimal_lookahead", "sdsl_throughput"),
    "sdx.theory.architectures": ("llama_like", "load_architecture"),
    "sdx.theory.hardware": (
        "Hardware", "StepTable", "load_hardware", "step_breakdown", "step_seconds", "step_table",
    ),
    "sdx.theory.throughput": ("predict",),
    "sdx.theory.trees": (
        "LogAAT", "expected_tokens_of_tree", "fit_aat", "optimal_tree", "soft_tree",
    ),
    "sdx.theory.cascades": ("cascade", "threshold_cascade"),
    "sdx.theory.thresholds": ("threshold_chain", "threshold_tree"),
    "sdx.search": ("break_even", "design", "intervals", "pareto", "schedule"),
    "sdx.models.checkpoint": ("load_model", "save_model"),
    "sdx.decoding.generation": ("generate", "stream"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sdx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
