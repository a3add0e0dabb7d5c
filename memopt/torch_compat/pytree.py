"""Tensors in any nesting of containers, as torch flattens and maps them; tried on torch 2.11 and 2.13."""

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten
