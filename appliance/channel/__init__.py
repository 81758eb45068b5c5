"""Types that the core and the front processes share, apart from the messages between them."""
