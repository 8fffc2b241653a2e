"""The exceptions and the warning that keepk raises on purpose.

::

    ValueError
    └── KeepkError
        ├── SpaceError         a space that matches nothing, asks for too much, or overlaps another space
        ├── PlanError          a schedule that cannot keep exactly K units within its epochs
        ├── RankError          weights or scores that cannot be ranked (NaN, infinite, wrong shape)
        ├── OptimizerError     an optimizer whose state cannot follow the masks
        ├── StateError         a state_dict from a different model, plan or format version
        ├── CheckpointError    a checkpoint that cannot be written, read or verified
        ├── TraceError         a model, an example or a rule that cannot be traced
        ├── ShrinkError        channels that cannot be removed, or tensors that another object still refers to
        ├── FileError          a saved model that cannot be written, read or verified
        ├── SparseError        a model, an input or a CPU that keepk.sparse cannot serve
        ├── DisagreementError  processes that would keep different weights
        └── DataError          data files that are missing, truncated or have the wrong checksum

    UserWarning
    └── KeepkWarning           every warning of keepk: a wrong count, a meaningless ranking

Every message says what is wrong, where, what was passed, and what to do about it. Every error is a ``ValueError``, so
code can catch them without importing keepk. A warning is issued once per cause. To silence warnings or turn them into
errors, filter by class: ``warnings.filterwarnings("error", category=keepk.KeepkWarning)``.

>>> issubclass(SpaceError, KeepkError) and issubclass(KeepkError, ValueError)
True
"""


class KeepkError(ValueError):
    """The base class of all errors that keepk raises on purpose."""


class SpaceError(KeepkError):
    """A space that matches nothing, asks for more units than there are, or overlaps another space."""


class PlanError(KeepkError):
    """A schedule that cannot keep exactly K units within its epochs."""


class RankError(KeepkError):
    """Weights or scores that cannot be ranked: NaN, infinite, or of the wrong shape."""


class OptimizerError(KeepkError):
    """An optimizer whose state cannot follow the masks."""


class StateError(KeepkError):
    """A state_dict from a different model, plan or format version."""


class CheckpointError(KeepkError):
    """A checkpoint that cannot be written, read or verified."""


class TraceError(KeepkError):
    """A model, an example or a rule that cannot be traced."""


class ShrinkError(KeepkError):
    """Channels that cannot be removed, or tensors that another object still refers to."""


class FileError(KeepkError):
    """A saved model that cannot be written, read or verified."""


class SparseError(KeepkError):
    """A model, an input or a CPU that `keepk.sparse` cannot serve."""


class DisagreementError(KeepkError):
    """Processes of a distributed run that would keep different weights."""


class DataError(KeepkError):
    """Data files that are missing, truncated or have the wrong checksum."""


class KeepkWarning(UserWarning):
    """The class of every warning that keepk issues, so that one filter silences them or turns them into errors.

    It is issued when a count is wrong (pruned weights are no longer zero), when a ranking says little (most scores are
    equal, BatchNorm scales hardly differ, or a layer would lose nearly all of its units), when selected layers have
    channels that cannot be removed and are not counted, when `Pruner.step` seems to be called once per batch, and when
    a model is saved before its first event.
    """
