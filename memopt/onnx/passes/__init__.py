"""The rewrites of ONNX graphs, one per file, and the pipelines: explicit tuples in order."""

from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.passes.drop_zero_bias import DropZeroBias
from memopt.onnx.passes.eliminate_dead import EliminateDead
from memopt.onnx.passes.eliminate_no_ops import EliminateNoOps
from memopt.onnx.passes.fold_constants import FoldConstants
from memopt.onnx.passes.fuse_activations import FuseActivations
from memopt.onnx.passes.fuse_attention import FuseAttention
from memopt.onnx.passes.fuse_conv_bn import FuseConvBn
from memopt.onnx.passes.fuse_conv_relu import FuseConvRelu
from memopt.onnx.passes.fuse_matmul_add import FuseMatmulAdd
from memopt.onnx.passes.fuse_multi_head_attention import FuseMultiHeadAttention
from memopt.onnx.passes.fuse_normalization import FuseNormalization
from memopt.onnx.passes.fuse_quick_gelu import FuseQuickGelu
from memopt.onnx.passes.fuse_skip_layer_norm import FuseSkipLayerNorm
from memopt.onnx.passes.fuse_skip_rms_norm import FuseSkipRmsNorm
from memopt.onnx.passes.merge_common import MergeCommon
from memopt.onnx.passes.order_nodes import OrderNodes
from memopt.onnx.passes.share_initializers import ShareInitializers
from memopt.onnx.passes.simplify_shapes import SimplifyShapes
from memopt.onnx.passes.split_without_sequence import SplitWithoutSequence

_FIRST: tuple[OnnxPass, ...] = (
    EliminateNoOps(),
    FoldConstants(),
    SplitWithoutSequence(),
    SimplifyShapes(),
    EliminateNoOps(),  # once more: whole slices and the like are seen when their bounds are constants
    # What was computed from a shape that is known now: the scale of attention, axes, sizes.
    FoldConstants(),
    FuseMatmulAdd(),
    FuseConvBn(),
    DropZeroBias(),
    FuseActivations(),
    FuseNormalization(),
)
_LAST: tuple[OnnxPass, ...] = (ShareInitializers(), MergeCommon(), EliminateDead(), OrderNodes())

# Standard operators only: for every engine.
STANDARD: tuple[OnnxPass, ...] = (*_FIRST, FuseAttention(), *_LAST)
# With ONNX Runtime's own operators (com.microsoft) where these do more.
ONNXRUNTIME: tuple[OnnxPass, ...] = (
    *_FIRST,
    FuseMultiHeadAttention(),
    FuseSkipLayerNorm(),
    FuseSkipRmsNorm(),
    FuseQuickGelu(),
    FuseConvRelu(),
    *_LAST,
)
# The same for CUDA: there its FusedConv takes more memory and time than the two operators (3.3 for 2.4 ms, ResNet-50).
ONNXRUNTIME_CUDA: tuple[OnnxPass, ...] = tuple(item for item in ONNXRUNTIME if not isinstance(item, FuseConvRelu))
