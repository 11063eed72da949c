"""Multi-start gradient ascent of ln(gain / (seconds * price)), every start and problem at once.

A problem is a function `parts(x, profile, cell, common) -> Parts`: `x` [n] real design variables,
`profile` one row of a table of integers (lookahead, tree budget, depth) that is searched exactly,
`cell` numbers that differ between the problems solved together (batch, context, devices), `common`
a pytree they share (target, hardware, laws). Rounds alternate: the whole profile table is looked at
and its best row kept (the envelope theorem: the gradient of the maximum is the gradient there),
then Adam moves x. Constraints enter as slacks (>= 0 is feasible) through a penalty that is annealed
from soft to hard; the caller rounds and re-evaluates exactly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sdx.records import Number, record
from sdx.search.space import Space, to_unit, to_values


@record
class Parts:
    """Score = gain / (seconds * price). A design is allowed where all `slack` [k] and `free_slack`
    are >= 0; each `slack` is monotone in each variable (whatever its sign), `free_slack` need not
    be: box bounds use the former."""

    gain: Number
    seconds: Number
    price: Number
    slack: Any
    free_slack: Number = 1.0


def log_score(p: Parts):
    return jnp.log(p.gain) - jnp.log(p.seconds) - jnp.log(p.price)


def exact_score(p: Parts):
    """ln score, -inf where a constraint is violated."""
    return jnp.where(jnp.all(p.slack >= 0) & (p.free_slack >= 0), log_score(p), -jnp.inf)


def _penalised(parts, space, z, profile, cell, common, weight):
    p = parts(to_values(space, z), profile, cell, common)
    violation = jnp.sum(jnp.maximum(-p.slack, 0.0)) + jnp.maximum(-p.free_slack, 0.0)
    return log_score(p) - weight * violation


def evaluations_of_ascent(profiles: int, rounds: int, inner: int) -> int:
    """Objective evaluations per start; a gradient counts as three."""
    return (rounds + 1) * profiles + 3 * (rounds * inner + 1)


@partial(jax.jit, static_argnames=("parts", "space", "rounds", "inner"))
def ascend(parts, space: Space, profiles, cells, common, z0, *, rounds=4, inner=6, rate=0.12):
    """Climbs from every start `z0` [s, n] in every problem `cells` [p, c].

    Returns (values x [p, s, n], row of `profiles` [p, s], penalised ln score [p, s]).
    """
    optimiser = optax.adam(1.0, b1=0.7, b2=0.9)
    steps = rounds * inner
    score = partial(_penalised, parts, space)

    def look(z, cell, weight):
        table = jax.vmap(lambda row: score(z, row, cell, common, weight))(profiles)
        row = jnp.argmax(table)
        return row, table[row]

    def climb(z, cell):
        # One loop body (it compiles once): every `inner` steps the table is looked at, after the
        # last step only that.
        def step(i, state):
            z, adam, row, best = state
            weight = 3.0 * 4.0 ** (i // inner)
            row, best = jax.lax.cond(
                i % inner == 0, lambda: look(z, cell, weight), lambda: (row, best)
            )
            slope = jax.grad(lambda z: -score(z, profiles[row], cell, common, weight))(z)
            # A non-finite slope (a corner where a law is clipped) must not spoil the start.
            updates, adam = optimiser.update(jnp.nan_to_num(slope), adam)
            move = jnp.where(i < steps, rate * 0.03 ** (i / steps), 0.0)
            return jnp.clip(z + move * updates, 0.0, 1.0), adam, row, best

        state = (z, optimiser.init(z), jnp.argmax(profiles[:, 0] * 0), -jnp.inf)
        z, _, row, best = jax.lax.fori_loop(0, steps + 1, step, state)
        return to_values(space, z), row, best

    return jax.vmap(lambda cell: jax.vmap(lambda z: climb(z, cell))(z0))(cells)


@partial(jax.jit, static_argnames=("parts", "space", "steps"))
def polish(parts, space: Space, profiles, cells, common, x, rows, *, steps=12, rate=0.05):
    """Climbs from x [p, n] once for each profile row of `rows` [p, r], the row kept.

    Measured costs have several good lookaheads, each with its own best draft: the alternation of
    `ascend` keeps the first one it likes. Returns (values [p, r, n], ln score [p, r]).
    """
    optimiser = optax.adam(1.0, b1=0.7, b2=0.9)

    def climb(z, row, cell):
        score = lambda z: _penalised(parts, space, z, profiles[row], cell, common, 1e3)  # noqa: E731

        def step(i, state):
            z, adam = state
            updates, adam = optimiser.update(jnp.nan_to_num(-jax.grad(score)(z)), adam)
            return jnp.clip(z + rate * 0.1 ** (i / steps) * updates, 0.0, 1.0), adam

        z, _ = jax.lax.fori_loop(0, steps, step, (z, optimiser.init(z)))
        return to_values(space, z), score(z)

    each_row = jax.vmap(climb, in_axes=(None, 0, None))
    return jax.vmap(each_row)(to_unit(space, x), rows, cells)
