"""The names that users import, and that asking for one does not load the whole house."""

import subprocess
import sys

import pytest

import sdx


@pytest.mark.parametrize("name", sdx.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    value = getattr(sdx, name)
    assert value.__doc__ and value.__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lambert'"):
        sdx.lambert  # noqa: B018


def test_theory_loads_no_network_and_the_package_nothing():
    code = (
        "import sys, sdx; assert 'jax' not in sys.modules;"
        "from sdx import predict; assert 'flax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
