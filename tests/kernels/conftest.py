import contextlib
import inspect

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def abstract_device(platform):
    """A context in which kernels lower for a device that is not there.

    JAX 0.10 assumes sm_90 for cuda; later versions ask the abstract mesh. The constructor's
    arguments differ between versions.
    """
    kinds = {"cuda": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite"}
    arguments = dict(device_kind=kinds[platform], num_cores=1 if platform == "tpu" else None)
    if "platform" in inspect.signature(AbstractDevice).parameters:
        arguments["platform"] = {"cuda": "gpu", "tpu": "tpu"}[platform]
    try:
        device = AbstractDevice(**arguments)
        return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    except TypeError:
        return contextlib.nullcontext()


@pytest.fixture
def lower():
    """`lower(function, platform, *shapes)`: text of the module, lowered without the device."""

    def run(function, platform, *shapes):
        with abstract_device(platform):
            traced = jax.jit(function).trace(*shapes)
            return traced.lower(lowering_platforms=(platform,)).as_text()

    return run
