"""Kernels for verification: one folder per op.

Every op has a public door (`api.py`), a readable implementation in plain JAX that is also the
truth the kernels are held against (`reference.py`), and Pallas bodies (`pallas_triton.py` for
NVIDIA GPUs, `pallas_tpu.py` for TPUs). `dispatch.py` picks between them, once for all ops.

Nothing here imports the rest of sdx: arrays in, arrays out.
"""

from sdx.kernels.cache_write.api import cache_write
from sdx.kernels.dispatch import IMPLEMENTATIONS, available, wanted
from sdx.kernels.tree_attention.api import ancestor_bits, pack_tree_mask, tree_attention
from sdx.kernels.verify import rules as verification_rules
from sdx.kernels.verify.api import Law, Request, Surplus, known_law, law, surplus

__all__ = [
    "IMPLEMENTATIONS",
    "Law",
    "Request",
    "Surplus",
    "ancestor_bits",
    "available",
    "cache_write",
    "known_law",
    "law",
    "pack_tree_mask",
    "surplus",
    "tree_attention",
    "verification_rules",
    "wanted",
]
