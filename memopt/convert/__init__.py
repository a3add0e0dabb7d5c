"""From a model to a verified ONNX file: capture, emission, proof, and writing whole or not at all."""
