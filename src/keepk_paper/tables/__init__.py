"""The tables of the docs, generated from result files."""
