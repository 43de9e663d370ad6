"""Which cached tokens to forget, and where those that stay lie."""
