"""Training of language models: configuration, text, packing, checkpoints."""
