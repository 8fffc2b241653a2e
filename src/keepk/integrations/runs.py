"""The part that all adapters share: a run whose `Pruner` a callback makes, its state, and events in a user's loop.

A framework decides when the model and the optimizer exist. In a new run, the Pruner is made when training begins. In a
resumed run it is made earlier, because the model has to be cut before the framework loads weights into it; the
optimizer, which frameworks build later, is attached when training begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from keepk.checkpoint.checkpoint import INDEX, load_checkpoint, save_checkpoint
from keepk.cut.holders import Follower
from keepk.errors import KeepkError, PlanError, ShrinkError, StateError
from keepk.model.names import unwrap
from keepk.plan.names import shown
from keepk.plan.spaces import Space
from keepk.run.pruner import Pruner
from keepk.run.warnings import warn

Every = Literal["epoch"] | int
SHOWN = 5  # spaces in a warning


class CallbackRun:
    """The spaces and options of a callback, and the `Pruner` once it is made.

    Args:
        who: How errors name the callback.
        spaces: As for `keepk.Pruner`.
        every: The time between events: "epoch", or a number of optimizer steps.
        options: The other arguments of `keepk.Pruner`, except for the model and the optimizer.
    """

    def __init__(self, who: str, spaces: Space | Sequence[Space], every: Every, options: Mapping[str, Any]) -> None:
        self.who, self._spaces, self._options = who, spaces, dict(options)
        if every != "epoch" and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise PlanError(f'{who}: every={shown(every)}. Pass "epoch" or a number of optimizer steps.')
        for name in ("model", "optimizer"):
            if name in options:
                raise KeepkError(f"{who}: {name}= comes from the framework. Leave it out.")
        self.every = every
        self._own_followers = tuple(options.get("followers", ()))
        self._made: Pruner | None = None
        self._paused = ExitStack()

    @property
    def pruner(self) -> Pruner:
        """The Pruner.

        Raises:
            KeepkError: Training has not begun.
        """
        if self._made is None:
            raise KeepkError(f"{self.who}: the Pruner is made when training begins. Read .pruner after that.")
        return self._made

    @property
    def has_begun(self) -> bool:
        """Whether the Pruner was made."""
        return self._made is not None

    @property
    def removes_channels(self) -> bool:
        """Whether events change the sizes of tensors."""
        kinds = {entry["kind"] for entry in self.pruner.certificate.values()}
        return "channels" in kinds and self._options.get("shrink") != "never"

    def follow(self, averages: Sequence[Follower]) -> None:
        """Cut these with the model too, besides the user's followers. Call it before training and before `resume`.

        Raises:
            KeepkError: The Pruner exists already and would still cut the model, but not these.
        """
        followers = [*self._own_followers]
        followers += [it for it in averages if not any(it is other for other in followers)]
        if self._made is not None and not self._made.closed:
            known = self._options.get("followers", ())
            if not self._made.done and not all(any(it is other for other in known) for it in followers):
                raise KeepkError(
                    f"{self.who}: an average of the weights was made after the Pruner, so it would not follow the "
                    f"events to come. Train to the last event without averaging, or resume from a checkpoint with a "
                    f"new model and new callbacks."
                )
            return
        self._options["followers"] = followers

    @contextmanager
    def begun(self, model: nn.Module, optimizers: Any) -> Iterator[None]:
        """Make the Pruner, or attach the optimizers to that of a resumed run.

        The body checks whether training suits the plan; if it raises, a Pruner that was made here is closed.
        """
        new = self._made is None or self._made.closed
        if new:
            self._made = Pruner(model, self._spaces, optimizers, **self._options)
        else:
            self._refuse_other_model(model)
            self.pruner.attach(optimizers)
        try:
            yield
        except Exception:
            if new:
                self.pruner.close()
            raise

    def resume(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Make the Pruner, and cut the model to its size in a saved state.

        Raises:
            StateError: The state comes from another model or plan.
        """
        if self._made is not None:
            self._refuse_other_model(model)
        made = self._made or Pruner(model, self._spaces, (), **self._options)
        try:
            load_run_state([made], states_in(state))
        except Exception:
            if made is not self._made:
                made.close()
            raise
        self._made = made

    def collect_gradients(self) -> None:
        """Add the gradients of a batch to the statistics that metrics read."""
        for statistics in self.pruner.statistics if not self.pruner.done else ():
            if "gradients" in statistics.of:
                statistics.update()

    def pause(self) -> None:
        """Do not count forward passes from now on, such as those of a validation, until `unpause`."""
        self.unpause()
        for statistics in self.pruner.statistics:
            self._paused.enter_context(statistics.paused())

    def unpause(self) -> None:
        """Count forward passes again."""
        self._paused.close()

    def refuse_too_short(self, events: int, training: str) -> None:
        """Refuse training that ends before the plan: it would keep more than K.

        Args:
            events: How many events training has time for.
            training: How long training is, for the error.
        """
        pruner = self.pruner
        if events < (missing := pruner.epochs - pruner.epoch):
            every = "epochs" if self.every == "epoch" else f"times {self.every} optimizer steps"
            raise PlanError(
                f"{self.who}: the plan needs {missing} more events, one after each of {missing} {every}, but training "
                f"{training} has time for {events}, so more than K units would be left. Train longer, or use a "
                f"shorter schedule or a smaller every=."
            )

    def warn_at_end(self) -> None:
        """Warn if training has ended with more units than planned: before the last event, or with other weights."""
        pruner = self._made
        if pruner is None or pruner.closed:
            return
        kept = pruner.kept  # warns of units that are no longer zero
        if pruner.done:
            return
        left = [
            f"budget {name!r} is at {budget['reached']:,} instead of {budget['asked']:,}"
            if (budget := pruner.budgets.get(name))
            else f"space {name!r} has {kept[name]:,} instead of {counts[-1]:,}"
            for name, counts in pruner.plan.items()
        ]
        warn(
            f"{self.who}: training ended after {pruner.epoch} of {pruner.epochs} events of the plan, so more units are "
            f"left than planned: {', '.join(left[:SHOWN])}{', ...' * (len(left) > SHOWN)}. Resume it and train on, or "
            f"stop it early only after the last event."
        )

    def _refuse_other_model(self, model: nn.Module) -> None:
        if self.pruner.model is not model:
            raise KeepkError(
                f"{self.who}: it has pruned another {type(model).__name__} already. Make a new callback for this one."
            )


def run_state(*pruners: Pruner) -> dict[str, Any]:
    """The state of a Pruner and of the statistics that its metrics read, as plain values and tensors.

    With several Pruners, the list ``others`` has the states of all but the first.
    """
    first, *others = [
        {"pruner": pruner.state_dict(), "statistics": [it.state_dict() for it in pruner.statistics]}
        for pruner in pruners
    ]
    return {**first, "others": others} if others else first


def states_in(state: Any) -> list[dict[str, Any]]:
    """What `run_state` returned, as one state for each Pruner.

    Raises:
        StateError: It is something else.
    """
    states = [state, *state.get("others", ())] if isinstance(state, Mapping) else []
    if not states or not all(isinstance(it, Mapping) and {"pruner", "statistics"} <= set(it) for it in states):
        raise StateError("pruning: the checkpoint has no state of pruning. Resume from a checkpoint of this run.")
    return states


def load_run_state(pruners: Sequence[Pruner], states: Sequence[Mapping[str, Any]]) -> None:
    """Load states: cut the models, and restore masks and statistics; all of them or none.

    Raises:
        StateError: A state comes from another model or plan.
    """
    for pruner, state in zip(pruners, states, strict=True):
        if len(state["statistics"]) != len(pruner.statistics):
            raise StateError(
                f"pruning: the state has {len(state['statistics'])} statistics, and the spaces read "
                f"{len(pruner.statistics)}. Pass the same spaces."
            )
    if len(pruners) == 1:
        pruners[0].load_state_dict(states[0]["pruner"])
    else:
        with ExitStack() as undos:
            # All models are cut before the first mask is restored, because a cut is what a wrong state fails at.
            for pruner, state in zip(pruners, states, strict=True):
                undos.callback(pruner._session.take_shape(state["pruner"]))
            for pruner, state in zip(pruners, states, strict=True):
                undos.callback(pruner._session.take_masks(state["pruner"]))
            undos.pop_all()
    for pruner, state in zip(pruners, states, strict=True):
        for statistics, saved in zip(pruner.statistics, state["statistics"], strict=True):
            statistics.load_state_dict(saved)


def write_state(folder: Path, state: Mapping[str, Any], step: int = 0) -> None:
    """Write the state of a run into a folder, completely or not at all."""
    save_checkpoint(folder, extra={"step": step, **state})


def read_state(folder: Path) -> dict[str, Any]:
    """Read what `write_state` wrote. Random number generators do not change.

    Raises:
        CheckpointError: The folder has no such state, or a damaged one.
    """
    found: dict[str, Any] = load_checkpoint(folder)
    return found


def has_state(folder: Path) -> bool:
    """Whether a folder has a state of a run."""
    return (folder / INDEX).is_file()


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """By name of a tensor, a digest of its dtype, shape and bits; anything else in the mapping is left out."""
    found = dict[str, str]()
    for name, value in tensors.items():
        if type(value) in {Tensor, nn.Parameter} and not value.is_meta:
            # On the host one at a time, in the order of a contiguous tensor. A bfloat16 has no numpy dtype, bytes have.
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest = sha256(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(flat.view(torch.uint8).numpy())
            found[name] = digest.hexdigest()
    return found


# In the user's own loop -----------------------------------------------------------------------------------------------


def pruner_of(given: object, who: str) -> Pruner:
    """The argument, if it is a `Pruner`."""
    if not isinstance(given, Pruner):
        raise KeepkError(f"{who}: got {type(given).__name__} as the pruner. Pass the keepk.Pruner of the model.")
    return given


def stepped(
    pruner: Pruner, wrapper: Any, log: Callable[[dict[str, float]], None], prepared: Sequence[nn.Module] = ()
) -> Any:
    """Hold an event and log its numbers; returns what replaces a `DistributedDataParallel` wrapper, or None.

    Args:
        pruner: The Pruner.
        wrapper: The pruned model, in a wrapper or not.
        log: Logs numbers.
        prepared: The models that the framework has prepared; `wrapper` may be one of them that is a part of the pruned
            model, which then is a container of several.

    Raises:
        KeepkError: The wrapper is that of another model.
    """
    model = pruner.model
    is_part = any(it is wrapper for it in prepared) and any(it is unwrap(wrapper) for it in model.modules())
    if not is_part and not _contains(wrapper, model):
        raise KeepkError(
            f"step: got {'None' if wrapper is None else type(wrapper).__name__}, which is not the model of this Pruner "
            f"({type(model).__name__}). Pass the prepared model that it prunes."
        )
    before = pruner.epoch
    replaced = pruner.step(wrapper) if isinstance(wrapper, DistributedDataParallel) else pruner.step()
    if pruner.epoch > before:  # not after the end of the plan
        log(pruner.report().flat())
    return replaced


def _contains(wrapper: Any, model: nn.Module) -> bool:
    """Whether a wrapper, or what was passed as one, has a model inside, or is the model."""
    if not isinstance(wrapper, nn.Module):
        return False
    if any(it is model for it in wrapper.modules()):
        return True
    # Some wrappers, such as Accelerate's regional compilation, copy the outermost module and share its parameters.
    own, theirs = ({id(it) for it in module.parameters()} for module in (model, wrapper))
    return bool(own) and own <= theirs


@contextmanager
def cut_before_wrapping(remedy: str) -> Iterator[None]:
    """A context that cuts a model, which may be in a wrapper; `remedy` says how to cut it before it is wrapped."""
    try:
        yield
    except (ShrinkError, StateError) as error:
        if "DistributedDataParallel" not in str(error):
            raise
        raise KeepkError(
            f"resume: the model has to be cut to its saved size before it is wrapped in DistributedDataParallel. "
            f"{remedy}"
        ) from error
