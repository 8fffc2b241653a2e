"""Thin adapters between keepk and training frameworks; each file is the only place that imports its framework."""
