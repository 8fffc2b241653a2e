"""The claims of the paper, each with a verdict that follows from the results by a rule stated beside it.

`verdicts` has the rule, `claims_weights` and `claims_channels` the claims.
"""

from keepk_paper.report import claims_channels, claims_weights
from keepk_paper.report.lines import Results
from keepk_paper.report.verdicts import Claim


def claims(results: Results) -> list[Claim]:
    """All claims, in the order of the paper."""
    return [
        claims_weights.exact(results),
        *claims_weights.parity(results),
        *claims_weights.mnist(results),
        *claims_channels.claims(results),
    ]
