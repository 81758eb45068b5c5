"""Builds the demo model that ships with the product: creates the corpus, tokenizer and conversations, and
trains, exports and scores the model."""
