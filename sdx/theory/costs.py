"""What drafting and verifying cost: the papers' abstract laws, rooflines and measured steps.

An abstract cost's "second" is a FLOP or a pass of the target; otherwise seconds come from
`theory.hardware`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from sdx.records import Number, record
from sdx.theory.hardware import Hardware, linear_seconds, step_seconds
from sdx.theory.transformers import BYTES_PER_NUMBER, Architecture, llama_like


@record
class SdslCost:
    """SDSL's proxy for time, 2 (M + gamma N) FLOPs: one token charged for verification."""

    N: Number
    M: Number

    def draft(self, passes):
        return 2.0 * self.N * passes

    def verify(self, new_tokens):
        return 2.0 * self.M * jnp.ones_like(new_tokens)


@record
class FlopsCost:
    """True FLOPs, 2 (M (gamma + 1) + gamma N): per-FLOP and per-joule objectives."""

    N: Number
    M: Number

    def draft(self, passes):
        return 2.0 * self.N * passes

    def verify(self, new_tokens):
        return 2.0 * self.M * new_tokens


@record
class LeviathanCost:
    """gamma c + 1 in units of a target pass (Leviathan et al. 2023); c = `cost_ratio`."""

    cost_ratio: Number

    def draft(self, passes):
        return self.cost_ratio * passes

    def verify(self, new_tokens):
        return jnp.ones_like(new_tokens)


AbstractCost = SdslCost | FlopsCost | LeviathanCost

# ---------------------------------------------------------------------------- drafters

_PARALLEL = ("medusa",)  # one pass drafts every position
_HEADS = ("eagle", "eagle3", "poss")


def draft_architecture(spec, target: Architecture) -> Architecture | None:
    """The network a `DrafterSpec` stands for beside `target`; None where there is none to run.

    independent: a Llama-like decoder with the target's vocabulary. eagle, eagle3, poss: `layers`
    of the target's width and shape in front of the target's own LM head. medusa and ngram run no
    decoder of their own (see `draft_seconds`).
    """
    if spec.family == "independent":
        return llama_like(
            spec.layers, spec.width, target.vocabulary, weight_dtype=spec.weight_dtype
        )
    if spec.family in _HEADS:
        dense = dict(ffn="dense", experts=0.0, active_experts=0.0, dense_layers=0.0)
        return dataclasses.replace(
            target, **dense, layers=spec.layers, window_layers=0.0, name=spec.family
        )
    return None


def medusa_seconds(hardware: Hardware, target: Architecture, batch, heads, layers, dtype):
    """One pass of `heads` Medusa heads: `layers` residual blocks of width^2 and an LM head each."""
    weights = heads * (layers * target.width**2 + target.vocabulary * target.width)
    bytes_ = weights * BYTES_PER_NUMBER[dtype]
    return linear_seconds(hardware, 2.0 * batch * weights, bytes_, dtype).seconds


def draft_seconds(spec, draft, target, hardware, workload, passes, tensor_parallel=1.0):
    """Seconds of drafting `passes` positions in a row.

    A sequential drafter takes `passes` one-token steps, on one device or split like the target,
    whichever is faster (engines offer both). Medusa takes one pass for all positions, an n-gram
    table none.
    """
    if isinstance(hardware, AbstractCost):
        return hardware.draft(passes)
    if spec.family == "ngram":
        return jnp.zeros_like(passes)
    if spec.family in _PARALLEL and draft is None:
        seconds = medusa_seconds(
            hardware, target, workload.batch, passes, spec.layers, spec.weight_dtype
        )
        return jnp.where(passes > 0, seconds, 0.0)
    return passes * draft_pass_seconds(draft, hardware, workload, 1.0, tensor_parallel)


def draft_pass_seconds(draft, hardware, workload, new_tokens, tensor_parallel):
    """A draft pass on one device or split like the target, whichever is faster; what of the draft
    fits into on-chip memory is not read. (Of the target's weights the same bytes could be kept, but
    they are read once per round, the draft's once per drafted token.)"""
    step = (workload.batch, new_tokens, workload.context)
    if not isinstance(hardware, Hardware):
        return step_seconds(draft, hardware, *step)
    resident = hardware.on_chip_memory_bytes
    one = step_seconds(draft, hardware, *step, resident_bytes=resident)
    split = step_seconds(draft, hardware, *step, tensor_parallel, resident_bytes=resident)
    return jnp.minimum(one, split)


def verify_seconds(target, hardware, workload, new_tokens, tensor_parallel=1.0, ancestors=None):
    """Seconds of the target's pass over `new_tokens` positions of each sequence."""
    if isinstance(hardware, AbstractCost):
        return hardware.verify(new_tokens)
    return step_seconds(
        target, hardware, workload.batch, new_tokens, workload.context, tensor_parallel, ancestors
    )
