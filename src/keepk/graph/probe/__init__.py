"""Checks of a trace on cut copies of the model, and repairs of the Python numbers that prevent a cut."""
