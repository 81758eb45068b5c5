"""Metrics: what monitoring systems scrape. `families` says what there is, the others how it comes about."""
