"""The model: one decoder described by `engine.config.ModelConfig`, and its loader."""
