"""Types that the core and the fronts share, apart from the messages themselves."""
