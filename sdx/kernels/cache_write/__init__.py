"""Writing the accepted path into the cache."""
