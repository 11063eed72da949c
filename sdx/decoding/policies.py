"""From a policy record and draft models to a drafter.

Legend: base.py.
"""

from __future__ import annotations

from typing import Any

from sdx.decoding.base import Drafter
from sdx.decoding.cascades import CascadeDrafter
from sdx.decoding.chains import ChainDrafter, NoDrafter
from sdx.decoding.confidence import Calibration, Uncalibrated
from sdx.decoding.heads import HeadModel, bind
from sdx.decoding.llama_target import as_target
from sdx.decoding.thresholds import ThresholdDrafter
from sdx.decoding.trees import DynamicTreeDrafter, StaticTreeDrafter, check_parents, topology
from sdx.models.heads import Head, HeadConfig
from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    DynamicTree,
    Policy,
    StaticTree,
    ThresholdChain,
)


def whole(name: str, value: Any, least: int) -> int:
    """The value as an int; ValueError if it is not a whole number of at least `least`."""
    if int(value) != value or value < least:
        raise ValueError(f"{name} = {value}: must be a whole number of at least {least}")
    return int(value)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value; ValueError if it is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: must be one of {', '.join(choices)}")
    return value


def threshold_of(value: Any) -> float:
    """A threshold on a product of confidences, in (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"threshold = {value}: a product of confidences lies in (0, 1]")
    return float(value)


def build_drafter(
    policy: Policy,
    draft: Any = None,
    calibration: Calibration = Uncalibrated(),  # noqa: B008 (frozen)
    max_lookahead: int = 8,
    target: Any = None,
) -> Drafter:
    """The drafter that runs `policy`.

    draft: a draft model (a Llama or another `Target`), or a draft head for `target` (a `Head`, or
    one that `heads.bind` bound before); for a cascade all models, the smallest first; None for
    autoregression. calibration: of confidences, for thresholds. max_lookahead:
    the most tokens a threshold level of a cascade may hold.

    Raises ValueError where policy and draft do not fit.
    """
    if isinstance(policy, Autoregressive):
        return NoDrafter()
    if draft is None:
        raise ValueError(f"{type(policy).__name__} needs a draft model: pass one as `drafter`")
    if isinstance(policy, Cascade):
        return _cascade(policy, draft, calibration, whole("max_lookahead", max_lookahead, 1))
    model = bind(draft, target) if isinstance(draft, Head) else as_target(draft)
    if isinstance(model, HeadModel):
        check_head(model.head.config, policy)
    if isinstance(policy, Chain):
        verification = one_of("verification", policy.verification, ("token", "block"))
        return ChainDrafter(
            model=model,
            lookahead=whole("lookahead", policy.lookahead, 0),
            rule="block" if verification == "block" else "replacement",
        )
    if isinstance(policy, ThresholdChain):
        return ThresholdDrafter(
            model=model,
            threshold=threshold_of(policy.threshold),
            max_lookahead=whole("max_lookahead", policy.max_lookahead, 1),
            crossing=one_of("crossing", policy.crossing, ("keep", "drop")),
            calibration=calibration,
        )
    if isinstance(policy, StaticTree):
        parents = tuple(int(parent) for parent in policy.parents)
        check_parents(parents)
        kinds = ("replacement", "without_replacement", "top")
        children = one_of("children", policy.children, kinds)
        return StaticTreeDrafter(model=model, parents=parents, children=children)
    if isinstance(policy, DynamicTree):
        return DynamicTreeDrafter(
            model=model,
            budget=whole("budget", policy.budget, 1),
            depth=whole("depth", policy.depth, 1),
            branching=whole("branching", policy.branching, 1),
        )
    raise ValueError(f"no drafter for the policy {policy!r}")


def check_head(config: HeadConfig, policy: Policy) -> None:
    """Raises ValueError if a head of this shape cannot draft so."""
    height = {
        Chain: lambda: int(policy.lookahead),
        StaticTree: lambda: int(topology(tuple(policy.parents))["depths"].max(initial=0)),
        DynamicTree: lambda: int(policy.depth),
    }.get(type(policy), lambda: 0)()
    if config.longest is not None and height > config.longest:
        raise ValueError(
            f"{height} drafts in a row from a head with {config.longest} positions: draft less"
        )
    if isinstance(policy, ThresholdChain) and config.kind in ("poss", "medusa"):
        raise ValueError(
            f"a {config.kind} head has its own network per position: give a chain a fixed length"
        )


def _cascade(policy: Cascade, drafts: Any, calibration: Calibration, most: int) -> Drafter:
    """Level by level from the smallest model up; the target is not among `drafts`."""
    if bool(policy.lengths) == bool(policy.thresholds):
        raise ValueError("a cascade has either lengths or thresholds: give exactly one of them")
    rules = policy.lengths or policy.thresholds
    if not isinstance(drafts, (list, tuple)) or len(drafts) != len(rules):
        raise ValueError(
            f"a cascade of {len(rules)} levels needs a list of {len(rules)} draft models, the "
            "smallest first"
        )
    if any(isinstance(draft, (Head, HeadModel)) for draft in drafts):
        raise ValueError("a draft head drafts for its own target: it has no place in a cascade")
    smallest, *others = map(as_target, drafts)
    if policy.lengths:
        lengths = [whole("length", length, 1) for length in policy.lengths]
        drafter: Drafter = ChainDrafter(model=smallest, lookahead=lengths[0])
        for model, length in zip(others, lengths[1:], strict=True):
            drafter = CascadeDrafter(model=model, below=drafter, length=length)
        return drafter
    thresholds = [threshold_of(threshold) for threshold in policy.thresholds]
    drafter = ThresholdDrafter(
        model=smallest, threshold=thresholds[0], max_lookahead=most, calibration=calibration
    )
    for model, threshold in zip(others, thresholds[1:], strict=True):
        drafter = CascadeDrafter(
            model=model, below=drafter, length=most, threshold=threshold, calibration=calibration
        )
    return drafter
