"""Compiler options of tests about compiled programs, whatever the suite's own are (conftest.py)."""

OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
