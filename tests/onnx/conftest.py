import importlib.util

# Without the `onnx` extra there is nothing to test here.
collect_ignore_glob = ["*"] if importlib.util.find_spec("onnxruntime") is None else []
