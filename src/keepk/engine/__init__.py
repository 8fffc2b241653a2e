"""Models with pruned weights as compiled programs for the CPU; `keepk.engine.sparse` is the entry point."""
