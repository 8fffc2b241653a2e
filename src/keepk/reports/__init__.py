"""Tables, reports and terminal plots."""
