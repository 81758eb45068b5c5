"""The served models and the replicas that run them."""
