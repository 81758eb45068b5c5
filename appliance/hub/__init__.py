"""Downloads models from a Hugging Face hub. Only the command line imports this package, which loads
huggingface_hub and connects to the network."""
