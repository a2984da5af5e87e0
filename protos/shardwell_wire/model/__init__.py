"""Units, grids and optimizers, and how both are described."""
