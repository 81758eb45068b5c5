"""Looking after the box: what it is made of, and what is wrong with it."""
