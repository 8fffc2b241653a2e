"""Changes with a way back: made all, or none."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

T = TypeVar("T")
Undo = Callable[[], None]
Change = Callable[[], Undo]


def all_or_nothing(changes: Sequence[Change]) -> Undo:
    """Make all changes; at the first that fails, take back those before it. What is returned takes all back."""
    with ExitStack() as undos:
        for change in changes:
            undos.callback(change())
        return undos.pop_all().close


def replaced(read: Callable[[], T], write: Callable[[T], object], new: T) -> Change:
    """A change that writes something new in the place of what is read there; the way back writes that again.

    >>> shelf = ["old"]
    >>> undo = replaced(lambda: shelf[0], lambda it: shelf.__setitem__(0, it), "new")()
    >>> undo(), shelf
    (None, ['old'])
    """

    def change() -> Undo:
        old = read()

        def undo() -> None:
            write(old)

        with undone_by(undo):
            write(new)
            return undo

    return change


@contextmanager
def undone_by(undo: Undo) -> Iterator[None]:
    """A change is itself all or nothing, up to the moment in which it hands out the way back."""
    try:
        yield
    except BaseException:
        undo()
        raise
