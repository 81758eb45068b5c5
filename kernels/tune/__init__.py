"""Selects the fastest kernel for each linear on a GPU: generates candidates, times them and chooses one."""
