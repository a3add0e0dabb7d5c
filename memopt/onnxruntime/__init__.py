"""What the engine `onnxruntime` is made of: its session, its memory, and attention as its operators."""
