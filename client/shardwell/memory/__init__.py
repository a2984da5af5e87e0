"""Memory of this process and of its GPU: how it is allocated, lent again and copied."""
