"""A page to look at components with: static files that open from disk, and a loopback server for them."""
