"""Inductor's own operators under `torch.ops.prims`, which exist once its module is imported (2.11, 2.13)."""

import torch
import torch._inductor.inductor_prims

prims = torch.ops.prims
