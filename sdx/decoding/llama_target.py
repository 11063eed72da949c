"""A Llama behind the runtime's `Target` protocol."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sdx.kernels import IMPLEMENTATIONS
from sdx.models.cache import Cache, Fresh, empty_cache
from sdx.models.llama import Llama
from sdx.models.opt import Opt
from sdx.models.small_steps import PLAIN, prepare
from sdx.records import record, static


@record
class Reading:
    """Logits of the tokens asked for; of all tokens read the keys and values, the head's input and
    the residual stream after each layer (what nobody uses is not computed)."""

    logits_BxTxV: jax.Array
    fresh: Fresh
    hidden_BxTxD: jax.Array
    layers: tuple[jax.Array, ...]


@record
class LlamaTarget:
    """Target, or draft model: the decoder with its cache.

    kernels: which implementation of the ops of `sdx.kernels` attends, writes the cache and judges;
    "auto" is the platform's best.
    """

    model: Llama | Opt
    kernels: str = static(default="auto")

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    @property
    def stop_ids(self) -> tuple[int, ...]:
        eos = self.model.config.eos_id
        return () if eos is None else (eos,)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        return empty_cache(self.model.config, batch, capacity, kernels=self.kernels)

    def join(self, parts: list[Fresh]) -> Fresh:
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts)

    def pad(self, fresh: Fresh, tokens: int) -> Fresh:
        T = fresh.keys[0].shape[2]
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, tokens - T), (0, 0))), fresh)

    def __call__(
        self, tokens_BxT, cache, mask=None, positions=None, pending=None, last=None
    ) -> Reading:
        extra = {} if pending is None else {"pending": pending}
        output = self.model(tokens_BxT, cache, mask=mask, positions=positions, **extra)
        logits = output.logits_BxTxV
        if last is not None and last < tokens_BxT.shape[1]:
            # The other rows' logits are then dead code: the head is half of a small draft.
            logits = self.model.logits(output.hidden_BxTxD[:, -last:])
        return Reading(
            logits_BxTxV=logits,
            fresh=output.fresh,
            hidden_BxTxD=output.hidden_BxTxD,
            layers=output.layers,
        )


def as_target(model: Any) -> Any:
    """A Llama (or OPT) becomes a `Target`, its matrices laid out for small steps on this device
    (`sdx.models.small_steps`); what already is a target passes through. Laying out copies the
    weights: wrap once when decoding many times."""
    if isinstance(model, Opt):
        return LlamaTarget(model=model)
    if not isinstance(model, Llama):
        return model
    return LlamaTarget(model=prepare(model) if model.forms == PLAIN else model)


def kernels_of(model: Any) -> str:
    """Which implementation of the ops a target asks for; "auto" if it does not say."""
    return getattr(model, "kernels", "auto")


def with_kernels(part: Any, kernels: str) -> Any:
    """A target or drafter whose models, also those of the levels below, use these kernels.

    Raises ValueError for an unknown name.
    """
    if kernels not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"kernels = {kernels!r}: choose auto, {', '.join(IMPLEMENTATIONS)}")
    if not dataclasses.is_dataclass(part):
        return part
    names = {field.name for field in dataclasses.fields(part)}
    new = {name: with_kernels(getattr(part, name), kernels) for name in names & {"model", "below"}}
    if "kernels" in names:
        new["kernels"] = kernels
    return dataclasses.replace(part, **new)
