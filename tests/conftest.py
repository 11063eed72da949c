"""The suite compiles thousands of small programs and runs each of them briefly: compile quickly.

A test of a compiled program itself (no copy of a cache in the loop) switches the optimisations back
on. JAX_DISABLE_MOST_OPTIMIZATIONS=0 runs the whole suite with them. Set in the environment, so that
processes that tests start compile the same programs.
"""

import os

import jax

VARIABLE, FLAGS = "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"
os.environ.setdefault(VARIABLE, "1")
quickly = os.environ[VARIABLE].lower() not in ("0", "false", "")
jax.config.update(VARIABLE.lower(), quickly)
if quickly and jax.__version_info__ < (0, 11):
    # They take half of all compile time; later versions know no such flag.
    os.environ[FLAGS] = os.environ.get(FLAGS, "") + " --xla_cpu_use_fusion_emitters=false"
