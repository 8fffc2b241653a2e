"""Changes with a way back: made all, or none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

Undo = Callable[[], None]
Change = Callable[[], Undo]


def all_or_nothing(changes: Sequence[Change]) -> Undo:
    """Make all changes; at the first that fails, take back those before it. What is returned takes all back."""
    with ExitStack() as undos:
        for change in changes:
            undos.callback(change())
        return undos.pop_all().close


@contextmanager
def undone_by(undo: Undo) -> Iterator[None]:
    """A change is itself all or nothing, up to the moment in which it hands out the way back."""
    try:
        yield
    except BaseException:
        undo()
        raise
