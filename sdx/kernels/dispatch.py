"""Which implementation of an op runs.

    implementation=None or "auto"   the platform's preference list, first that can
    implementation="triton"         that one or an error, never another

An implementation that cannot serve a request (a dtype, a shape, a platform) raises
`NotImplementedError` *while tracing*; that exception alone means "ask the next one". Every other
exception is a defect and is not caught.

The choice is visible in what it produces: a Pallas body is named `<op>_<implementation>`, so the
jaxpr, the lowered module and a profile all say what ran (`kernels_in` reads it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

IMPLEMENTATIONS = ("reference", "triton", "tpu")

PREFERENCE = {
    "gpu": ("triton", "reference"),
    "cuda": ("triton", "reference"),
    "rocm": ("reference",),  # the Triton tiles were chosen for NVIDIA; named "triton" still runs
    "tpu": ("tpu", "reference"),
    "cpu": ("reference",),
}
NATIVE = {"triton": ("gpu", "cuda", "rocm"), "tpu": ("tpu",)}


def interpreted(implementation: str, interpret: bool | None) -> bool:
    """Whether a Pallas body is interpreted: as asked, else exactly where it cannot be compiled."""
    if interpret is not None:
        return interpret
    return jax.default_backend() not in NATIVE[implementation]


def wanted(implementation: str | None) -> bool:
    """Whether a caller with a fast form of its own for CPUs should call the op instead of it: an
    implementation is named, or "auto" runs where there are kernels."""
    return implementation not in (None, "auto") or jax.default_backend() != "cpu"


def available(table: Mapping[str, Callable]) -> tuple[str, ...]:
    """Names of an op's implementations, in the order of `IMPLEMENTATIONS`."""
    return tuple(name for name in IMPLEMENTATIONS if name in table)


def dispatch(
    op: str,
    table: Mapping[str, Callable],
    implementation: str | None,
    *args: Any,
    platform: str | None = None,
    **kwargs: Any,
) -> Any:
    """Runs `table[name](*args, **kwargs)` for the chosen name.

    Args:
      op: the op's name, for messages.
      table: implementations by name.
      implementation: a name, or None / "auto".
      platform: for "auto"; the default backend if None.

    Raises:
      ValueError: unknown name, or "auto" found nothing that can serve the request.
      NotImplementedError: the named implementation cannot serve the request.
    """
    if implementation not in (None, "auto"):
        if implementation not in table:
            raise ValueError(
                f"{op} has no implementation {implementation!r}: "
                f"choose one of auto, {', '.join(available(table))}"
            )
        with jax.enable_x64(False):
            return table[implementation](*args, **kwargs)
    platform = platform or jax.default_backend()
    refusals = []
    for name in PREFERENCE.get(platform, ("reference",)):
        if name not in table:
            continue
        try:
            with jax.enable_x64(False):
                return table[name](*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    reasons = "; ".join(refusals) or "none is registered"
    raise ValueError(
        f"{op}: no implementation for platform {platform!r} can serve this request ({reasons}); "
        f"name one of {', '.join(available(table))}"
    )


def kernels_in(function: Callable, *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Names of the Pallas kernels that calling `function(*args, **kwargs)` would run, in order."""
    closed = jax.make_jaxpr(functools.partial(function, **kwargs))(*args)
    return tuple(_kernel_names(closed.jaxpr))


def _kernel_names(jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"]
            continue
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _kernel_names(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
