"""Which to keep: metrics (tensors to scores) and the one exact selection."""
