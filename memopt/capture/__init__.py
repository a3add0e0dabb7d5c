"""From a model to programs: torch.export for inference, Dynamo and AOTAutograd for training."""
