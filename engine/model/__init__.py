"""The decoder and its weight loader. `engine.config.ModelConfig` describes the structure of the decoder."""
