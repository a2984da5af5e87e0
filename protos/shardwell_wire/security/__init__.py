"""TLS, tokens and credentials."""
