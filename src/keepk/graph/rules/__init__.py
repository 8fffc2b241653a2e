"""The built-in rules, one short function for each kind of operation. Importing this package registers them all."""

from keepk.graph.rules import contractions as contractions
from keepk.graph.rules import indexing as indexing
from keepk.graph.rules import movement as movement
from keepk.graph.rules import pointwise as pointwise
from keepk.graph.rules import reduction as reduction
