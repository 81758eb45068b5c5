"""Selects the fastest kernel for each linear on a GPU, by generating and timing candidate plans."""
