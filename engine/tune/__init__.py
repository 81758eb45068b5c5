"""The offline tuner, `python -m engine.tune`: which kernel each linear of a decoder gets on a GPU."""
