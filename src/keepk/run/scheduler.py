"""Learning-rate schedulers in a checkpoint: their state, without the functions in it.

A LambdaLR keeps its functions in its state_dict. A file cannot hold a function without pickle, so a checkpoint has
their names alone, and restoring takes the functions from the scheduler that the user has built again.
"""

from typing import Any

from keepk.errors import CheckpointError
from keepk.run.parts import refuse_other_class


class SchedulerPart:
    """A learning-rate scheduler. Functions in its state are not stored: the rebuilt scheduler must have the same."""

    def __init__(self, name: str, scheduler: Any) -> None:
        self._name, self._scheduler = name, scheduler

    def capture(self) -> Any:
        """See `Part`."""
        functions: dict[tuple[Any, ...], Any] = {}
        state = _without_functions(self._scheduler.state_dict(), (), functions)
        names = {path: function.__qualname__ for path, function in functions.items()}
        return {"class": type(self._scheduler).__qualname__, "functions": names, "state": state}

    def check(self, saved: Any) -> None:
        """See `Part`."""
        own = self.capture()
        refuse_other_class(self._name, saved["class"], own["class"])
        if saved["functions"] != own["functions"]:
            raise CheckpointError(
                f"{self._name}: uses the functions {sorted(own['functions'].values())} here and "
                f"{sorted(saved['functions'].values())} in the checkpoint. Build it with the same ones."
            )

    def restore(self, saved: Any) -> None:
        """See `Part`."""
        functions: dict[tuple[Any, ...], Any] = {}
        _without_functions(self._scheduler.state_dict(), (), functions)
        self._scheduler.load_state_dict(_with_functions(saved["state"], (), functions))


def _without_functions(tree: Any, path: tuple[Any, ...], found: dict[tuple[Any, ...], Any]) -> Any:
    """The tree with None in place of each function; the functions are added to `found`, by path."""
    # A class is callable too, but it is refused later by the codec. A callable object without a name is kept as it is:
    # LambdaLR saves such an object's __dict__ instead of the object.
    if callable(tree) and hasattr(tree, "__qualname__") and not isinstance(tree, type):
        found[path] = tree
        return None
    if type(tree) is dict:
        return {key: _without_functions(value, (*path, key), found) for key, value in tree.items()}
    if type(tree) is list:
        return [_without_functions(value, (*path, index), found) for index, value in enumerate(tree)]
    return tree


def _with_functions(tree: Any, path: tuple[Any, ...], functions: dict[tuple[Any, ...], Any]) -> Any:
    """The tree with the functions back in their places."""
    if path in functions:
        return functions[path]
    if type(tree) is dict:
        return {key: _with_functions(value, (*path, key), functions) for key, value in tree.items()}
    if type(tree) is list:
        return [_with_functions(value, (*path, index), functions) for index, value in enumerate(tree)]
    return tree
