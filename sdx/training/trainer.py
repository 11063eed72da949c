"""One training loop for every network: Muon for matrices, AdamW for the rest, Orbax checkpoints.

The loop knows no model: it moves a flat dict of weights down a loss. The learning rate follows the
larger of two shares, steps done and time gone, so that a run ends in time, annealed, on a machine
of unknown speed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

Weights = dict[str, jax.Array]
Loss = Callable[..., jax.Array]  # (model, batch, *context) -> scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm up, stay, decay to zero linearly over the last `decay` of the run (WSD).

    `steps` and `seconds` both bound the run; either may be infinite, not both.
    """

    steps: float = float("inf")
    seconds: float = float("inf")
    warmup_steps: int = 60
    decay: float = 0.4

    def progress(self, step: int, seconds: float) -> float:
        """Share of the run that is over, 0 to 1."""
        return min(1.0, max(step / self.steps, seconds / self.seconds))

    def factor(self, step: int, seconds: float) -> float:
        """Learning rate at this point as a share of its peak."""
        left = 1.0 - self.progress(step, seconds)
        return min(1.0, (step + 1) / self.warmup_steps, left / self.decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak learning rates: Muon's (spectral norm of one update) and AdamW's."""

    matrix: float = 0.02
    rest: float = 3e-3
    newton_schulz_steps: int = 5


def to_weights(model: Any) -> tuple[Weights, Callable[[Weights], Any]]:
    """A model as a flat dict of weights by name, and the way back."""
    paths, tree = jax.tree_util.tree_flatten_with_path(model)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    return (
        dict(zip(names, (leaf for _, leaf in paths), strict=True)),
        lambda weights: jax.tree.unflatten(tree, [weights[name] for name in names]),
    )


def optimizer(weights: Weights, rates: Rates) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for embeddings, head, norms."""
    labels = {
        name: "matrix" if w.ndim == 2 and "blocks" in name else "rest"
        for name, w in weights.items()
    }
    return optax.partition(
        {
            "matrix": optax.contrib.muon(
                rates.matrix, ns_steps=rates.newton_schulz_steps, weight_decay=0.01
            ),
            "rest": optax.adamw(rates.rest, b1=0.9, b2=0.95, weight_decay=1e-3),
        },
        labels,
    )


@dataclasses.dataclass(kw_only=True)
class Progress:
    """Where a run stands; `seconds` counts earlier, interrupted parts too."""

    step: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


class Trainer:
    """Trains one model: `fit` runs to the end of the schedule, resuming from its folder.

    loss(model, batch, *context) -> scalar; `batches(step, progress)` is the batch of a step;
    `context` are arrays or models that are not trained (a teacher).
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        batches: Callable[[int, float], np.ndarray],
        schedule: Schedule,
        *,
        rates: Rates | None = None,
        context: tuple[Any, ...] = (),
        folder: Path | None = None,
    ):
        self.weights, self.rebuild = to_weights(model)
        self.batches, self.schedule, self.context = batches, schedule, context
        transform = optimizer(self.weights, rates or Rates())
        self.moments = transform.init(self.weights)
        self.progress = Progress()
        self.folder = folder
        self.manager = None
        if folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            self.manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

        def step(weights, moments, batch, factor, context):
            value, slope = jax.value_and_grad(lambda w: loss(self.rebuild(w), batch, *context))(
                weights
            )
            clip = jnp.minimum(1.0, 1.0 / (optax.tree.norm(slope) + 1e-6))
            slope = jax.tree.map(lambda g: g * clip, slope)
            change, moments = transform.update(slope, moments, weights)
            weights = jax.tree.map(lambda w, d: w + factor * d, weights, change)
            return weights, moments, value

        self.step = jax.jit(step, donate_argnums=(0, 1))

    @property
    def model(self) -> Any:
        """The model with the present weights."""
        return self.rebuild(self.weights)

    def save(self) -> None:
        """An atomic checkpoint of weights, moments and progress."""
        if self.manager is not None:
            self.manager.save(self.progress.step, args=ocp.args.StandardSave(self._tree()))
            self.manager.wait_until_finished()

    def resume(self) -> bool:
        """Continues from the newest checkpoint in the folder; False if there is none."""
        latest = None if self.manager is None else self.manager.latest_step()
        if latest is None:
            return False
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._tree())
        tree = self.manager.restore(latest, args=ocp.args.StandardRestore(like))
        self.weights, self.moments = tree["weights"], tree["moments"]
        self.progress = Progress(step=latest, seconds=float(tree["seconds"]))
        return True

    def _tree(self):
        seconds = np.asarray(self.progress.seconds)
        return {"weights": self.weights, "moments": self.moments, "seconds": seconds}

    def fit(
        self,
        report: Callable[[Trainer], None] = lambda trainer: None,
        *,
        report_seconds: float = 30.0,
        save_seconds: float = 180.0,
        stop_step: float = float("inf"),
    ) -> Progress:
        """Steps until the schedule ends (or until `stop_step`: an interruption)."""
        begin = time.monotonic() - self.progress.seconds
        reported = saved = self.progress.seconds
        now = self.progress
        while now.step < stop_step:
            share = self.schedule.progress(now.step, now.seconds)
            if share >= 1.0:
                break
            batch = self.batches(now.step, share)
            factor = np.float32(self.schedule.factor(now.step, now.seconds))
            self.weights, self.moments, value = self.step(
                self.weights, self.moments, batch, factor, self.context
            )
            now.loss = float(value)
            now.step, now.seconds = now.step + 1, time.monotonic() - begin
            if now.seconds - reported > report_seconds:
                reported = now.seconds
                report(self)
            if now.seconds - saved > save_seconds:
                saved = now.seconds
                self.save()
        self.save()
        return now
