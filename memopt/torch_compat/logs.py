"""Names of torch's loggers; tried on torch 2.11 and 2.13. Nothing of torch is imported here."""

FAKE_TENSORS = "torch._subclasses.fake_tensor"
"""Logs with a traceback what it raises as well."""

WHILE_EXPORTING = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch.onnx", "onnxscript", FAKE_TENSORS)
"""What exporters say beside what they return or raise."""
