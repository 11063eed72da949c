"""What draft heads have in common: their shape, their one call, and who sees whom.

A head drafts from the target's *features*. With tokens x_0 x_1 ... and features f_t (what the
target computed after reading x_t), slot t of a head pairs the token x_{t+1} with the feature f_t,
and predicts the feature f_{t+1}, hence the law of x_{t+2}:

    slot            0          1          2      |   3            4            draft slots
    token          x_1        x_2        x_3     |  x^4          x^5           drafted
    feature        f_0        f_1        f_2     |  f^3          f^4           predicted
    predicts     f_1, x_2   f_2, x_3   f^3, x^4  | f^4, x^5    f^5, x^6
    step            0          0          0      |   1            2

*Step* j counts how many predictions old the feature is: 0 is the target's own. One call serves
whole sequences (training) and a few nodes (decoding), because who sees whom is an argument:

    hidden = head.fuse(features)            at step 0; later it is the output of the step before
    output = head(parts, tokens, hidden, positions, attend, step)
    logits = head.logits(parts, output.hidden_BxTxD, step)

`attend(layer, q, k, v)` is attention: over the cache and an ancestor mask in decoding, over the
unrolled history in training (unroll.py). `layer` numbers all layers with keys of their own, those
of all specialists included. Parallel heads (Medusa) ignore tokens, positions and attend, and take
the target's feature at every step.

Legend: B batch, T pairs of one call, D width, F = D or 3 D features of the target, H query heads,
K key heads, E head dim, V vocabulary, U draft vocabulary (V, or the tokens kept).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from sdx.models.cache import Fresh
from sdx.models.config import ModelConfig
from sdx.models.llama import TargetParts

Kind = Literal["eagle", "eagle3", "poss", "medusa"]
KINDS = ("eagle", "eagle3", "poss", "medusa")
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Static shape of one head. Frozen and hashable, so it is part of the jit key.

    kind: "eagle" (HASS and KOALA too: same network, other training or more layers), "eagle3",
    "poss", "medusa". layers: K decoder layers (of each specialist), or residual blocks of each
    Medusa head. width: the target's. steps: positions with a head of their own (Medusa only).
    feature_layers: the target's layers whose *inputs* are fused (EAGLE-3; n of n layers is the
    last layer's output); empty: the top feature, the input of the target's LM head.
    positions_per_specialist, specialists: PosS-n; step j is served by specialist j // n, at most
    the last. kept: ascending target ids of a reduced draft vocabulary (EAGLE-3; empty: all).
    own_head: an LM head per Medusa head instead of the target's.
    norm_before_residual: whether EAGLE-3's residual stream starts from the normed features.
    """

    kind: Kind
    width: int
    vocab_size: int
    layers: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 2
    ffn_width: int = 1
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 1024
    steps: int = 0
    feature_layers: tuple[int, ...] = ()
    positions_per_specialist: int = 0
    specialists: int = 1
    kept: tuple[int, ...] = ()
    own_head: bool = False
    norm_before_residual: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"head kind {self.kind!r}: must be one of {', '.join(KINDS)}")
        for name in ("layers", "width", "vocab_size", "specialists"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if (self.kind == "poss") != (self.positions_per_specialist > 0):
            raise ValueError(
                f"positions_per_specialist = {self.positions_per_specialist} of a {self.kind} "
                "head: PosS needs at least 1, other heads have none"
            )
        if (self.kind == "medusa") != (self.steps > 0):
            raise ValueError(
                f"steps = {self.steps} of a {self.kind} head: a Medusa head has one head per "
                "position, other heads draft any number"
            )
        if (self.kind == "eagle3") != bool(self.feature_layers):
            raise ValueError(
                f"feature_layers = {self.feature_layers} of a {self.kind} head: EAGLE-3 fuses "
                "some, other heads take the top feature"
            )
        if self.kept and self.kind != "eagle3":
            raise ValueError(f"a {self.kind} head drafts with the target's LM head: keep all ids")
        rising = all(a < b for a, b in zip(self.kept, self.kept[1:], strict=False))
        if self.kept and not (rising and self.kept[0] >= 0 and self.kept[-1] < self.vocab_size):
            raise ValueError(f"kept ids must ascend within 0..{self.vocab_size - 1}")

    @classmethod
    def for_target(cls, target: ModelConfig, kind: Kind, layers: int = 1, **fields) -> HeadConfig:
        """A head for this target; its layers have the target's shape unless `fields` say else."""
        shape = {
            name: getattr(target, name)
            for name in (
                "width", "vocab_size", "heads", "kv_heads", "head_dim", "ffn_width", "rope_theta",
                "norm_eps", "max_positions",
            )
        }  # fmt: skip
        if kind == "eagle3":
            shape["feature_layers"] = default_feature_layers(target.layers)
        if kind == "poss":
            shape |= {"positions_per_specialist": 1, "specialists": 4}
        if kind == "medusa":
            shape["steps"] = 4
        return cls(kind=kind, layers=layers, **(shape | fields))

    @property
    def parallel(self) -> bool:
        """All steps at once from the target's feature, instead of one after the other."""
        return self.kind == "medusa"

    @property
    def feature_width(self) -> int:
        """F, width of the features that the head takes from the target."""
        return self.width * max(1, len(self.feature_layers))

    @property
    def draft_vocab(self) -> int:
        """U, number of tokens that the head can draft."""
        return len(self.kept) or self.vocab_size

    @property
    def cached_layers(self) -> int:
        """Layers with keys of their own."""
        return 0 if self.parallel else self.layers * self.specialists

    @property
    def longest(self) -> int | None:
        """The most steps it can draft; None is any number."""
        return self.steps if self.parallel else None

    def specialist(self, step: int) -> int:
        """Which specialist serves a step."""
        if self.kind != "poss":
            return 0
        return min(step // self.positions_per_specialist, self.specialists - 1)

    def block(self) -> ModelConfig:
        """The shape of its decoder layers, as a model of so many layers."""
        names = ("vocab_size", "width", "heads", "kv_heads", "head_dim", "ffn_width", "rope_theta")
        return ModelConfig(
            layers=self.layers * self.specialists,
            norm_eps=self.norm_eps,
            max_positions=self.max_positions,
            **{name: getattr(self, name) for name in names},
        )

    def to_fields(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        fields = dataclasses.asdict(self)
        return fields | {name: list(fields[name]) for name in ("feature_layers", "kept")}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> HeadConfig:
        """From `to_fields`. Raises ValueError for an unknown or a missing field."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = set(fields) - known
        if unknown:
            raise ValueError(f"head config has an unknown field {min(unknown)!r}")
        lists = {name: tuple(fields.get(name, ())) for name in ("feature_layers", "kept")}
        try:
            return cls(**(fields | lists))
        except TypeError as error:
            raise ValueError(f"head config is incomplete ({error})") from None


def default_feature_layers(layers: int) -> tuple[int, int, int]:
    """Inputs of layers 2, n // 2 and n - 3 as the engines take them; of a target with fewer than
    six layers 1, n // 2 and n - 1."""
    low, high = (2, layers - 3) if layers >= 6 else (1, layers - 1)
    return tuple(min(max(layer, 1), layers) for layer in (low, layers // 2, high))


@struct.dataclass
class HeadOutput:
    """hidden_BxTxD: predicted features, the next step's input. fresh: keys and values of every
    cached layer; zeros for specialists that no later step uses."""

    hidden_BxTxD: jax.Array
    fresh: Fresh


class Head(nnx.Module):
    """The contract of all heads; see the file's docstring. `blocks`: its layers."""

    MATRICES: tuple[str, ...] = ()
    config: HeadConfig

    def fuse(self, features_BxTxF: jax.Array) -> jax.Array:
        """The target's features as the hidden input of step 0, `[B, T, D]`."""
        return features_BxTxF

    def __call__(
        self,
        parts: TargetParts,
        tokens_BxT: jax.Array,
        hidden_BxTxD: jax.Array,
        positions_BxT: jax.Array,
        attend: Attend,
        step: int = 0,
    ) -> HeadOutput:
        """One step for T pairs.

        tokens_BxT: the token after each feature. hidden_BxTxD: `fuse` of the target's features at
        step 0, the output of the step before afterwards. positions_BxT: slots. attend: who sees
        whom (`[B, T, H, E]`, `[B, T, K, E]` twice -> `[B, T, H * E]`). step: a Python int.
        """
        raise NotImplementedError

    def logits(self, parts: TargetParts, hidden: jax.Array, step: int = 0) -> jax.Array:
        """Logits over the draft vocabulary, `[..., D]` to `[..., U]`."""
        return parts.logits(hidden)

    def expand(self, logits: jax.Array) -> jax.Array:
        """Logits over the target's vocabulary, `[..., U]` to `[..., V]`; -inf where not drafted."""
        c = self.config
        if not c.kept:
            return logits
        full = jnp.full((*logits.shape[:-1], c.vocab_size), -jnp.inf, logits.dtype)
        return full.at[..., np.asarray(c.kept)].set(logits)


def features_of(config: HeadConfig, output: Any) -> jax.Array:
    """The features that a head takes from a target's output (`models.llama.Output`, or another
    record with `hidden_BxTxD` and `layers`), `[B, T, F]`."""
    if not config.feature_layers:
        return output.hidden_BxTxD
    return jnp.concatenate([output.layers[layer - 1] for layer in config.feature_layers], axis=-1)


def no_keys(config: HeadConfig, batch: int, tokens: int, dtype: jnp.dtype) -> jax.Array:
    """Keys (or values) of a layer that nobody will look at."""
    return jnp.zeros((batch, config.kv_heads, tokens, config.head_dim), dtype)
