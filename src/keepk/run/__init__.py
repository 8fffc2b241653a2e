"""The `Pruner`, the only stateful class, and its checkpoints."""
