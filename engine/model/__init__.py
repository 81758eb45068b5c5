"""The decoder, with a structure described by `engine.config.ModelConfig`, and its weight loader."""
