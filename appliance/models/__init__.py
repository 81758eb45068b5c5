"""Models: what apps may name, and the replicas that run them."""
