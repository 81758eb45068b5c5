"""Builds the demo model that ships with the product. Its modules create the corpus, tokenizer and
conversations, and train, export and score the model."""
