"""Which modules of a model become units, and with which options."""
