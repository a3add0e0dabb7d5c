"""Which programs may multiply matrices by a library that keeps a buffer of the allocator's memory for it: cuBLAS.

What is not known to do without counts: an operator that is not named here, of another library, or a call of a graph.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from memopt.memory.cost.roofline import is_light
from memopt.program import Program, is_any_view, tensors_of
from memopt.torch_compat.inductor_settings import may_multiply_convolutions
from memopt.torch_compat.operators import OpOverload, schema_of

# Operators of ATen's, by name, whose kernels on CUDA are PyTorch's own or cuDNN's, beside light ones and views.
_WITHOUT = {
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
    "avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "upsample_nearest2d", "upsample_nearest2d_backward", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward",
    "upsample_bicubic2d", "upsample_bicubic2d_backward", "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward", "grid_sampler_2d", "grid_sampler_2d_backward", "native_batch_norm",
    "native_batch_norm_backward", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    "_batch_norm_with_update", "_batch_norm_with_update_functional", "_batch_norm_no_update", "batch_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_layer_norm", "native_layer_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward", "linalg_vector_norm", "norm", "sum", "mean", "prod", "amax",
    "amin", "max", "min", "aminmax", "argmax", "argmin", "any", "all", "var", "var_mean", "std", "std_mean",
    "logsumexp", "cumsum", "cumprod", "count_nonzero", "sort", "topk", "_softmax", "_softmax_backward_data",
    "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
    "nll_loss2d_backward", "mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward",
    "huber_loss", "huber_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward",
    "soft_margin_loss", "binary_cross_entropy_with_logits", "embedding", "embedding_dense_backward", "gather",
    "scatter", "scatter_add", "scatter_reduce", "index", "index_select", "index_put", "_unsafe_index",
    "_unsafe_index_put", "index_add", "index_copy", "index_fill", "masked_fill", "masked_scatter", "where",
    "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter", "select_backward",
    "slice_backward", "cat", "stack", "constant_pad_nd", "reflection_pad2d", "reflection_pad2d_backward",
    "replication_pad2d", "replication_pad2d_backward", "flip", "roll", "repeat", "tril", "triu", "im2col", "col2im",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "clone", "bernoulli", "rand_like", "randn_like",
    "randint_like", "empty_like", "new_empty", "new_empty_strided", "full_like", "new_full", "zeros_like",
    "new_zeros", "ones_like", "new_ones", "sym_size",
}  # fmt: skip
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_BY_CUDNN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST = 2**31 - 1  # elements; of more, a convolution may go by the product of matrices


def may_multiply(program: Program) -> bool:
    """Whether any call of the program may be a product of matrices by cuBLAS, were it on CUDA."""
    return not all(_does_without(node) for node in program.calls)


def _does_without(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload):
        return False
    if target in _CONVOLUTIONS:
        return _by_cudnn(node)
    name = schema_of(target).name.partition("::")[2]
    if target.namespace == "prims":
        return name != "svd"
    return target.namespace == "aten" and (is_light(node) or is_any_view(node) or name in _WITHOUT)


def _by_cudnn(node: fx.Node) -> bool:
    """Whether the convolution is cuDNN's: elsewhere images are laid out as matrices, and multiplied."""
    here = not torch.cuda.is_available() or torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if not here or not torch.backends.cudnn.enabled or torch.version.hip:
        return False
    if may_multiply_convolutions():  # Inductor may make a product of it
        return False
    tensors = [*tensors_of(node), *(item for operand in node.all_input_nodes for item in tensors_of(operand))]
    return all(item.ndim <= 4 and item.dtype in _BY_CUDNN and item.numel() <= _MOST for item in tensors)
