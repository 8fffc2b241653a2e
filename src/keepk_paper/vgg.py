"""VGG-16 on CIFAR-10, CIFAR-100 and SVHN: the paper's Tables 3 and 5.

Families of recipes:

==========================  ========================================================================================
dense, control              width 1/4: 50 epochs from scratch; 24 more from there, the control of the next two
keepk-P, blend-70           from ``dense``: 12 epochs with events, then 12 of fine-tuning. ``blend-70`` ranks by the
                            paper's blend with norms that are sums. It removes too many channels of the first layers,
                            because a norm that is a sum shrinks with the number of channels in front
trained-M-P, paper-M-P      from ``dense``, with other metrics and rates; and as in the paper's text: learning rate
                            .005, halved after each quarter, no weight decay
trained-M-S-70, alpha-*     as trained-M-70 with another schedule S (one event, cubic, equal events, other values of mu)
                            or with one space per layer; and with alpha = 0, for norms that are sums and means
untrained-M-70              as one-run-M-70, with events from the first epoch on
one-run-*                   one run under one learning-rate curve, with its controls and rivals; see `one_run`
full-*                      the paper's sizes and lengths: 250 epochs of SGD at .1 for the dense network, divided by
                            five after each quarter; then 250 at .005, halved after each quarter, no weight decay
==========================  ========================================================================================

The paper chose p0, N^c and alpha by a grid search and does not report all of them. Here p0 = .5, nu = .02 or .04, and
``full-*`` and ``keepk-*`` use alpha = 1, the BatchNorm's scale, which the paper found best for VGG-16.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from keepk.metrics.channels import blend, l1_l2
from keepk.plan.schedules import Annealing, AnySchedule, Cubic, OneShot
from keepk_paper import one_run
from keepk_paper.models import VGG16
from keepk_paper.one_run import FAST, METRICS, SLOW, Setting
from keepk_paper.recipes import FC, Recipe, Stage, paper_dense, paper_pruned

# The weights' norm is a sum. With alpha = 1 it has no influence, but it is part of the fingerprint in old checkpoints.
GAMMA = blend(alpha=1.0, weights=l1_l2)
SUMS = blend(alpha=0.5, weights=l1_l2)
vgg = partial(Recipe, network=VGG16, spaces={"conv": "features.*"}, units="output", batch=128, smoothing=0.1)
quarter = partial(vgg, options={"width": 0.25})
PLANS = {60: (422, SLOW), 70: (316, FAST)}  # of 1,056 channels
# Lower rates, for the curve of error against the rate; about as many events.
RATES = {
    10: (950, Annealing(p0=0.05, n1=6, nu=0.01)),
    30: (739, Annealing(p0=0.2, n1=6, nu=0.02)),
    50: (528, Annealing(p0=0.35, n1=6, nu=0.03)),
}
QUARTER = Setting(quarter, 40, first=12, middle=17, plans=PLANS)
HALF = Setting(partial(vgg, options={"width": 0.5}), 40, 12, 17, {60: (844, SLOW), 70: (633, FAST)})
FULL = Setting(partial(vgg, options={"width": 1.0}), 30, 9, 14, {60: (1_689, SLOW), 70: (1_267, FAST)})
SVHN = Setting(partial(vgg, options={"width": 1.0}), 20, 6, 9, {60: (1_689, Annealing(p0=0.5, n1=4, nu=0.04))})
CIFAR_100 = Setting(partial(vgg, options={"width": 0.5, "classes": 100}), 40, 12, 17, {50: (1_056, SLOW)})


def _from_dense(name: str, keep: int, schedule: AnySchedule, **options: Any) -> Recipe:
    """12 epochs of annealing with the fully connected layers frozen, then 12 of fine-tuning."""
    return _from_dense_to(name, {"conv": (keep, schedule)}, **options)


def _from_dense_to(name: str, goal: Mapping[str, tuple[int, AnySchedule]], **options: Any) -> Recipe:
    stages = [
        Stage(12, lr=0.05, flat=12, decay=5e-4, keep=goal, freeze=FC, report=False),
        Stage(12, lr=0.05, decay=5e-4),
    ]
    return quarter(name=name, start="dense", stages=stages, **options)


def _paper_text(percent: int) -> Iterator[Recipe]:
    """The paper's fine-tuning from ``dense``, in 48 epochs."""
    goal = {"conv": PLANS[percent]}
    part = partial(Stage, 12, flat=None, nesterov=False, report=False)
    stages = [part(lr=0.005, keep=goal, freeze=FC), *(part(lr=lr) for lr in (0.0025, 0.00125, 0.000625))]
    stages[-1] = replace(stages[-1], report=True)
    recipe = partial(quarter, start="dense", stages=stages, only_by_name=True)
    yield recipe(name=f"paper-gamma-{percent}", metric=GAMMA)
    yield recipe(name=f"paper-blend-{percent}", **METRICS["blend"])


def _trained() -> Iterator[Recipe]:
    for percent, plan in {**RATES, **PLANS}.items():
        for metric, ranking in METRICS.items():
            yield _from_dense(f"trained-{metric}-{percent}", *plan, **ranking, only_by_name=True)
    for percent in PLANS:
        yield from _paper_text(percent)


def _variants() -> Iterator[Recipe]:
    """The recipes of single comparisons, all at 70 %."""
    keep, schedule = PLANS[70]
    for metric, ranking in METRICS.items():
        options = {**ranking, "only_by_name": True}
        for name, other in SCHEDULES.items():
            yield _from_dense(f"trained-{metric}-{name}-70", keep, other, **options)
        shares = one_run.equal_shares(one_run.filters_of(VGG16(width=0.25)), keep)
        goal = {name: (count, schedule) for name, count in shares.items()}
        yield _from_dense_to(f"trained-{metric}-layers-70", goal, spaces={name: name for name in shares}, **options)
        events = QUARTER.curve(keep={"conv": PLANS[70]}, first_event=1)
        yield quarter(name=f"untrained-{metric}-70", stages=[events], control=one_run.DENSE, **options)
    norms = {"sums": blend(alpha=0.0, weights=l1_l2), "means": blend(alpha=0.0)}
    for name, metric_of_norms in norms.items():
        floor = {"layer_floor": 0.1} if name == "means" else {}
        yield _from_dense(f"alpha-0-{name}-70", keep, schedule, metric=metric_of_norms, only_by_name=True, **floor)


def equal_events(total: int, keep: int, events: int) -> tuple[int, ...]:
    """A plan that removes as many channels at each of `events` events, rounded.

    >>> equal_events(100, 30, 4)
    (82, 65, 48, 30)
    """
    return tuple(total - round((total - keep) * event / events) for event in range(1, events + 1))


SCHEDULES: dict[str, AnySchedule] = {
    "once": OneShot(),
    "cubic": Cubic(epochs=11),  # FAST has 11 events
    "equal": (*equal_events(1_056, 316, 11), 316),
    **{f"mu{mu}": replace(FAST, mu=mu) for mu in (0, 1, 100)},  # FAST has mu = 10
}
DENSE = quarter(name="dense", stages=[Stage(50, lr=0.1, flat=10, decay=5e-4)])
CONTROL = quarter(
    name="control",
    start="dense",
    stages=[Stage(12, lr=0.05, flat=12, decay=5e-4, report=False), Stage(12, lr=0.05, decay=5e-4)],
)
FULL_DENSE = paper_dense(VGG16, {"conv": "features.*"}, "output")
RECIPES = (
    DENSE,
    CONTROL,
    _from_dense("keepk-60", *PLANS[60], metric=GAMMA),
    _from_dense("keepk-70", *PLANS[70], metric=GAMMA),
    _from_dense("blend-70", *PLANS[70], metric=SUMS),
    FULL_DENSE,
    paper_pruned(FULL_DENSE, "full-50", 2_112, 10, GAMMA),
    paper_pruned(FULL_DENSE, "full-60", 1_689, 15, GAMMA),
    paper_pruned(FULL_DENSE, "full-70", 1_267, 20, GAMMA),
)


def _whole(setting: Setting) -> dict[str, Recipe]:
    kinds = (one_run.dense, one_run.pruned, one_run.alike, one_run.rivals)
    return one_run.by_name(*(kind(setting) for kind in kinds))


EXPERIMENTS = {
    "vgg16-cifar10": {**one_run.by_name(iter(RECIPES)), **_whole(QUARTER), **one_run.by_name(_trained(), _variants())},
    "vgg16-half-cifar10": _whole(HALF),
    "vgg16-full-cifar10": _whole(FULL),
    "vgg16-svhn": _whole(SVHN),
    "vgg16-half-cifar100": _whole(CIFAR_100),
}
