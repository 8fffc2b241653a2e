"""Facts about any `nn.Module`: names, examples, copies, layers, sizes, costs. Nothing here knows about pruning."""
