"""The rewrites of ONNX graphs, one per file."""
