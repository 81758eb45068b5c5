"""The decoder, whose structure is described by `engine.config.ModelConfig`, and its weight loader."""
