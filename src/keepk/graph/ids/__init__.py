"""Index maps: which channel each element of a tensor belongs to, and what operations say about them."""
