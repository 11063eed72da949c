"""From a policy record and draft models to a drafter.

Legend: base.py.
"""

from __future__ import annotations

from typing import Any

from sdx.decoding.base import Drafter
from sdx.decoding.chains import ChainDrafter, NoDrafter
from sdx.decoding.llama_target import as_target
from sdx.records import Autoregressive, Chain, Policy


def whole(name: str, value: Any, least: int) -> int:
    """The value as an int; ValueError if it is not a whole number of at least `least`."""
    if int(value) != value or value < least:
        raise ValueError(f"{name} = {value}: must be a whole number of at least {least}")
    return int(value)


def build_drafter(policy: Policy, draft: Any = None) -> Drafter:
    """The drafter that runs `policy`.

    draft: a Llama or another `Target` as draft model; None for autoregression.
    Raises ValueError where policy and draft do not fit.
    """
    if isinstance(policy, Autoregressive):
        return NoDrafter()
    if draft is None:
        raise ValueError(f"{type(policy).__name__} needs a draft model: pass one as `drafter`")
    if isinstance(policy, Chain):
        rule = {"token": "replacement", "block": "block"}.get(policy.verification)
        if rule is None:
            raise ValueError(f"verification = {policy.verification!r}: must be 'token' or 'block'")
        lookahead = whole("lookahead", policy.lookahead, 0)
        return ChainDrafter(model=as_target(draft), lookahead=lookahead, rule=rule)
    raise ValueError(f"no drafter for the policy {policy!r}")
