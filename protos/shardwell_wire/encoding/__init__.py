"""How values are encoded: wire dtypes, checksums, and streams of chunks."""
