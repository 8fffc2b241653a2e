"""How a model is wired: one traced forward pass, a rule per operation, the channels that it finds."""
