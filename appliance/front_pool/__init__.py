"""The front processes as the core sees them: started, configured, and given connections."""
