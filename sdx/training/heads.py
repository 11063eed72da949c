"""Training of a draft head: the papers' recipes, the phases, what is measured on the way.

    trainer = head_trainer(head, teacher, recipe("hass"), batches, Schedule(steps=2000), ...)
    trainer.fit()

Recipes (losses of head_losses.py): EAGLE trains on the target's features only; HASS unrolls and
adds a top-10 term; EAGLE-3 unrolls through its own features with weights 0.8^i and imitates no
feature; PosS unrolls, and what is detached between steps makes a specialist learn from its own
positions only; Medusa sums over its heads; KOALA is EAGLE with more layers and an adversary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sdx.models.config import ModelConfig
from sdx.models.discriminator import Discriminator
from sdx.models.heads import Head, HeadConfig, create_head
from sdx.models.llama import TargetParts
from sdx.training.devices import Layout
from sdx.training.head_data import GREEDY, SAMPLED, Features
from sdx.training.head_losses import (
    HeadLoss,
    Objective,
    Teacher,
    acceptance,
    discriminator_loss,
    generator_loss,
    head_loss,
    kept_law,
    unrolled,
)
from sdx.training.trainer import Phase, Rates, Schedule, Trainer

RECIPES = {
    "eagle": HeadLoss(feature=1.0, law=0.1, noise=0.1),
    "hass": HeadLoss(feature=1.0, law=0.1, top=1.0, steps=3),
    "eagle3": HeadLoss(steps=7, decay=0.8, detach=False),
    "poss": HeadLoss(feature=1.0, law=0.1, steps=6),
    "medusa": HeadLoss(steps=4, decay=0.8),
    "koala": HeadLoss(feature=1.0, law=0.1, noise=0.1),
}
KIND = {"hass": "eagle", "koala": "eagle"}  # the network where it is not the recipe's name


def recipe(name: str, **changes: Any) -> HeadLoss:
    """The losses of a paper, some fields changed. Raises ValueError for an unknown name."""
    if name not in RECIPES:
        raise ValueError(f"head {name!r}: must be one of {', '.join(RECIPES)}")
    return dataclasses.replace(RECIPES[name], **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Which head, trained how: a paper's recipe and what is changed in it.

    layers: K. positions_per_specialist: n of PosS-n (0 where there are no specialists). steps:
    drafts in a row that are trained (0: the recipe's); a Medusa head drafts so many, a PosS head
    has specialists for them. adversarial: KOALA's lambda (0: no adversary). feature_layers:
    EAGLE-3's (empty: the default for the target's depth).
    """

    recipe: str
    layers: int = 1
    positions_per_specialist: int = 0
    steps: int = 0
    objective: Objective = "ce"
    adversarial: float = 0.0
    feature_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.adversarial < 0:
            raise ValueError(
                f"adversarial = {self.adversarial:g}: lambda is 0 (no adversary) or positive"
            )
        if self.steps < 0:
            raise ValueError(f"steps = {self.steps}: train at least 1 draft in a row")
        if self.recipe == "poss" and self.positions_per_specialist < 1:
            raise ValueError(
                f"positions_per_specialist = {self.positions_per_specialist}: PosS needs 1 or more"
            )
        recipe(self.recipe)

    @property
    def unrolled(self) -> int:
        """Drafts in a row that are trained."""
        return self.steps or RECIPES[self.recipe].steps

    def config(self, target: ModelConfig) -> HeadConfig:
        """The head's shape. Raises ValueError for what means nothing to it."""
        kind = KIND.get(self.recipe, self.recipe)
        fields: dict[str, Any] = {}
        if self.feature_layers:
            fields["feature_layers"] = self.feature_layers
        if self.positions_per_specialist:
            fields["positions_per_specialist"] = self.positions_per_specialist
            fields["specialists"] = -(-self.unrolled // self.positions_per_specialist)
        if kind == "medusa":
            fields["steps"] = self.unrolled
        return HeadConfig.for_target(target, kind, self.layers, **fields)

    def loss(self, survival_weights: Sequence[float] = ()) -> HeadLoss:
        """survival_weights: dT/dS(k), k = 1 .. unrolled, where the objective is throughput."""
        weights = tuple(float(w) for w in survival_weights)
        return recipe(
            self.recipe, steps=self.unrolled, objective=self.objective, survival_weights=weights
        )

    def first_head(
        self, target: ModelConfig, parts: TargetParts, key: jax.Array, start: Head | None = None
    ) -> Head:
        """Random weights, or those of `start`: a head of the same shape, or the EAGLE head that all
        specialists start as. Raises ValueError for another one."""
        config = self.config(target)
        if start is None:
            return create_head(config, key, parts)
        if start.config == config:
            return start
        if config.kind == "poss":
            return specialists_from(start, config, key)
        raise ValueError(
            f"a {start.config.kind} head of {start.config.layers} layers is no start for this "
            f"{config.kind} head of {config.layers}: they differ in shape"
        )


def specialists_from(head: Head, config: HeadConfig, key: jax.Array) -> Head:
    """A PosS head whose specialists all start as a trained EAGLE head's layers (PosS, B.2)."""
    if config.kind != "poss" or head.config.kind != "eagle" or head.config.layers != config.layers:
        raise ValueError("specialists start from an EAGLE head of as many layers")
    new = create_head(config, key)
    new.fc_2DxD, new.fc_bias_D = head.fc_2DxD, head.fc_bias_D
    copies = [
        jax.tree.map(jnp.copy, block) for _ in range(config.specialists) for block in head.blocks
    ]
    new.blocks = nnx.List(copies)
    return new


def head_trainer(
    head: Head,
    teacher: Teacher,
    loss: HeadLoss,
    batches: Callable[[int, float], Any],
    schedule: Schedule,
    *,
    adversarial: float = 0.0,
    discriminator_rate: float = 3e-4,
    rates: Rates | None = None,
    key: jax.Array | None = None,
    folder: Path | None = None,
    mesh: Mesh | None = None,
    layout: Layout = "data",
    evaluate: Callable[[Head], dict[str, float]] | None = None,
    say: Callable[[str], None] = print,
) -> Trainer:
    """A trainer whose model is {"head": head}, and {"discriminator": ...} where `adversarial`
    (KOALA's lambda) is positive: then head and discriminator are updated in turn."""
    model: dict[str, Any] = {"head": head}
    phases = [
        Phase(loss=lambda model, batch, teacher: head_loss(model["head"], batch, teacher, loss))
    ]
    if adversarial < 0:
        raise ValueError(f"adversarial = {adversarial}: lambda is 0 (no adversary) or positive")
    if adversarial:
        c = head.config
        model["discriminator"] = Discriminator(
            c.width, c.draft_vocab, c.layers, jax.random.key(0) if key is None else key
        )
        generator = functools.partial(generator_loss, loss=loss, adversarial=adversarial)
        phases = [
            Phase(loss=generator, trains=is_head),
            Phase(
                loss=functools.partial(discriminator_loss, loss=loss),
                trains=is_discriminator,
                rates=Rates(matrix=0.0, rest=discriminator_rate),
            ),
        ]
    return Trainer(
        model,
        phases,
        batches,
        schedule,
        rates=rates,
        context=(teacher,),
        folder=folder,
        mesh=mesh,
        layout=layout,
        evaluate=None if evaluate is None else lambda model: evaluate(model["head"]),
        say=say,
    )


def is_head(name: str) -> bool:
    """Whether a weight of the pair is the generator's."""
    return name.startswith("['head']")


def is_discriminator(name: str) -> bool:
    """Whether a weight of the pair is the discriminator's."""
    return name.startswith("['discriminator']")


# ---------------------------------------------------------------------------- evaluation


@functools.partial(jax.jit, static_argnames=("steps", "greedy"))
def chances(head: Head, batch: Any, teacher: Teacher, steps: int, greedy: bool):
    """`[steps, B, S]` each: the chance that step j's draft at slot t is the text's token and is
    accepted, over the text's chance of it; and the chance that any draft is accepted.

    greedy (text chosen as the likeliest token): both are 1 where the head's likeliest token is the
    text's. Sampled text: min(1, q(x)/p(x)) and sum min(p, q).
    """
    found, teacher_BxSxV, _ = unrolled(head, HeadLoss(steps=steps), batch, teacher)
    p = jax.nn.softmax(teacher_BxSxV)
    kept_p = kept_law(head, teacher_BxSxV)
    tokens = batch["tokens"][:, 2:]  # slot t predicts x_{t+2}; the last slot has no text to compare
    here, rates = [], []
    for step in found:
        logits = step.logits_BxSxU
        full = head.expand(logits)
        if greedy:
            same = jnp.argmax(full[:, :-1], axis=-1) == tokens
            here.append(same.astype(jnp.float32))
            rates.append(here[-1])
            continue
        q = jax.nn.softmax(full)[:, :-1]
        px, qx = (jnp.take_along_axis(law, tokens[..., None], -1)[..., 0] for law in (p[:, :-1], q))
        here.append(jnp.minimum(1.0, qx / jnp.maximum(px, 1e-30)))
        rates.append(acceptance(kept_p, logits)[:, :-1])
    return jnp.stack(here), jnp.stack(rates)


def chain_survival(
    head: Head,
    teacher: Teacher,
    batch: dict[str, np.ndarray],
    prompt: int,
    positions: int,
    greedy: bool,
) -> np.ndarray:
    """S(1) .. S(positions) of chains that start anywhere after the first `prompt` tokens of texts
    that the target wrote (greedily, or sampled at temperature 1).

    Unbiased: a chain accepts the text's token x with probability min(p(x), q(x)), the text has it
    with probability p(x); the last factor is averaged over tokens exactly.
    """
    longest = head.config.longest
    count = positions if longest is None else min(positions, longest)
    if "seed" not in batch:
        batch = {**batch, "seed": np.uint32(0)}
    here, rates = (np.asarray(x, np.float64) for x in chances(head, batch, teacher, count, greedy))
    first, slots = max(prompt - 2, 0), here.shape[2]
    starts = slots - first - count + 1
    if starts < 1:
        raise ValueError(f"texts of {slots + 2} tokens are too short for {positions} positions")
    alive, found = 1.0, []
    for j in range(count):
        window = slice(first + j, first + j + starts)
        found.append(float(np.mean(alive * rates[j][:, window])))
        alive = alive * here[j][:, window]
    return np.asarray(found)


def judged(
    head: Head, teacher: Teacher, folder: Path, prompt: int, positions: int
) -> dict[str, dict[str, list[float]]]:
    """Survival and hazards (pos-acc) of chains on the held-out texts of `head_data.distil`, greedy
    ("0") and sampled at temperature 1 ("1")."""
    survival = {
        temperature: chain_survival(
            head, teacher, Features(folder / name).all(), prompt, positions, temperature == "0"
        )
        for temperature, name in (("0", GREEDY), ("1", SAMPLED))
    }
    return {
        "survival": {t: s.tolist() for t, s in survival.items()},
        "hazards": {t: hazards_of(s).tolist() for t, s in survival.items()},
    }


def hazards_of(survival: np.ndarray) -> np.ndarray:
    """P(draft k accepted | the ones before were) from S(k), k = 1 .."""
    return survival / np.maximum(np.r_[1.0, survival[:-1]], 1e-9)


def evaluator(
    teacher: Teacher, batch: dict[str, np.ndarray], prompt: int, positions: int, greedy: bool
) -> Callable[[Head], dict[str, float]]:
    """What training logs of a head: alpha (first position), pos-acc, tau of the chain, and "loss",
    minus tau (the best head is the longest)."""

    def evaluate(head: Head) -> dict[str, float]:
        survival = chain_survival(head, teacher, batch, prompt, positions, greedy)
        tau = 1.0 + float(survival.sum())
        position = {f"pos_acc_{k + 1}": float(h) for k, h in enumerate(hazards_of(survival))}
        return {"loss": -tau, "alpha": float(survival[0]), "tau": tau, **position}

    return evaluate
