"""Doing it: masks held, optimizer state carried along, parameters frozen."""
