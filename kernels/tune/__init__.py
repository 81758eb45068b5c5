"""Selects the fastest kernel for each linear on a GPU: generates candidate plans, times them and chooses the
fastest."""
