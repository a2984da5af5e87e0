"""The sharded module: what becomes of a module whose parameters live elsewhere, from its forward to its gradients."""
