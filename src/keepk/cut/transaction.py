"""Transactions: a list of changes that are all made, or none.

A `Change` is a function that does one thing and returns an `Undo`, the function that takes it back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

T = TypeVar("T")
Undo = Callable[[], None]
Change = Callable[[], Undo]


def all_or_nothing(changes: Sequence[Change]) -> Undo:
    """Make all changes; if one fails, undo those before it, last first.

    Returns:
        A function that undoes all of them.
    """
    with ExitStack() as undos:
        for change in changes:
            undos.callback(change())
        return undos.pop_all().close  # from here on nothing is undone when the block ends


def replaced(read: Callable[[], T], write: Callable[[T], object], new: T) -> Change:
    """A change that replaces a value; its undo writes the old value again.

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
    """Run `undo` if the block fails, so that a single change is itself all or nothing."""
    try:
        yield
    except BaseException:  # an interrupt too: the caller gets the undo only when the change returns
        undo()
        raise
