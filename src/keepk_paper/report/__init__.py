"""The report: each claim of the paper with a verdict, its tables and figures beside ours, as one HTML page.

`lines` reads the result files, `numbers` computes every number of the page from named lines, `runs` knows what the
recipes are called and which runs are still missing, `claims` has the verdicts, `grids` the tables, and `page` puts
them together. `keepk_paper.figures.report` draws the figures.
"""
