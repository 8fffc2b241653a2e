"""What keepk raises.

::

    ValueError
    └── KeepkError
        ├── SpaceError        a space names nothing, too little, or what another space has
        ├── PlanError         a schedule that cannot keep exactly K in its epochs
        ├── RankError         weights or scores that cannot be ranked (NaN, infinite, wrong shape)
        ├── OptimizerError    an optimizer whose state cannot follow the masks
        ├── StateError        a state of another model, plan or version
        ├── CheckpointError   a checkpoint that cannot be written, read or trusted
        ├── TraceError        a model, an example or a rule that cannot be traced
        ├── ShrinkError       channels that cannot be removed, or somebody who holds what would be cut
        ├── FileError         a saved model that cannot be written, read or trusted
        ├── DisagreementError processes that would keep different weights
        └── DataError         data files that are missing, cut short or not what was published

    UserWarning
    └── KeepkWarning          every warning of keepk: a count that became untrue, a ranking that decides little

Every message says what, where, got what, and what to do. All of them are ``ValueError``, so that code which
guards a constructor call needs no import from here. Warnings are given once per cause; to ignore them, or to make
them errors, filter the class: ``warnings.filterwarnings("error", category=keepk.KeepkWarning)``.
"""


class KeepkError(ValueError):
    """The root of all errors that keepk raises on purpose."""


class SpaceError(KeepkError):
    """A space names nothing, asks for more than there is, or takes what another space has."""


class PlanError(KeepkError):
    """A schedule that cannot keep exactly K in its epochs."""


class RankError(KeepkError):
    """Weights or scores that cannot be ranked."""


class OptimizerError(KeepkError):
    """An optimizer whose state cannot follow the masks."""


class StateError(KeepkError):
    """A state of another model, plan or version."""


class CheckpointError(KeepkError):
    """A checkpoint that cannot be written, read or trusted."""


class TraceError(KeepkError):
    """A model, an example or a rule that cannot be traced."""


class ShrinkError(KeepkError):
    """Channels that cannot be removed, or somebody who holds what would be cut."""


class FileError(KeepkError):
    """A saved model that cannot be written, read or trusted."""


class DisagreementError(KeepkError):
    """Processes that would keep different weights."""


class DataError(KeepkError):
    """Data files that are missing, cut short or not what was published."""


class KeepkWarning(UserWarning):
    """Every warning that keepk gives, so that one filter is enough to silence it or to turn it into an error.

    It is given when a count became untrue (pruned weights that came back), when a ranking decides little (most
    scores equal, BatchNorm scales that hardly differ, a layer about to lose nearly all of its units), when selected
    layers have channels that cannot be removed and are not counted, when `Pruner.step` seems to be called once per
    batch, and when a model is saved before its first event.
    """
