"""The paper's models, data, recipes, tables and figures."""
