"""Reports, tables and plots."""
