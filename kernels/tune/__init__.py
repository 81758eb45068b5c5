"""The search for the kernel of each linear on a GPU: candidates, timing, and the choice."""
