"""Downloads models from a Hugging Face hub. Only the command line imports this package, because the package
loads huggingface_hub and connects to the network."""
