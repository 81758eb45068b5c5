"""How the shipped demo model is made: corpus, tokenizer, conversations, training, export, score."""
