"""The decoder and its weight loader. `engine.config.ModelConfig` describes the decoder's structure."""
