"""The experiments of "Network Pruning via Annealing and Direct Sparsity Control" with keepk."""
