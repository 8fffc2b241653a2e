"""Removing neurons that weight pruning has left without inputs or outputs."""
