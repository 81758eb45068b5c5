"""Builds the shipped demo model: corpus, tokenizer, conversations, training, export and score."""
