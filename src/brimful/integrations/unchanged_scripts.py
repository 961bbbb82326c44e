"""Trainers of a script that stays as it is: each is planned, and its plan applied, when it begins to train.

What a script imports is followed by a finder on `sys.meta_path`, so that nothing is imported for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any, NoReturn

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from brimful.errors import BrimfulError, EquivalenceError, UsageError
from brimful.execution.random_state import undisturbed
from brimful.planner import Plan
from brimful.profiling.named_device import resolve_device
from brimful.requests import check_budget
from brimful.torch_utils.held_names import locals_of
from brimful.torch_utils.lines import is_users_own, shown_file
from brimful.torch_utils.replaced import replace_attribute

_TRAINERS = "plans a transformers.Trainer and a lightning.Trainer"
_WHOLE_BATCHES = """brimful: to plan with whole batches, write before trainer.train() in place of --budget:
  from brimful.integrations.transformers import apply, plan
  apply(plan(trainer, budget={!r}, micro_batch_size={}), trainer)"""


class PlannedTrainers:
    """Plans trainers inside a budget while it is entered, and applies each plan before it trains.

    With `device` the first plan is for that device, and ends the script in place of training.

    Args:
        budget: Of each plan; None for all that the device has.
        device: A device as for `brimful.plan`; None for the one that the trainer uses.
        say: Prints a text for the user.
        refuse: Ends the script where a trainer cannot be planned: it must not train outside of the budget.
    """

    def __init__(
        self,
        budget: str | None,
        device: str | None,
        *,
        say: Callable[[str], None],
        refuse: Callable[[BrimfulError], NoReturn],
    ) -> None:
        if budget is not None:
            check_budget(budget)
        if device is not None:
            resolve_device(device)
        self.plans: list[Plan] = []
        self.has_ended_script = False
        self._budget, self._device, self._say, self._refuse = budget, device, say, refuse
        self._has_stepped = self._is_planning = False
        self._ends = ExitStack()

    def __enter__(self) -> PlannedTrainers:
        self._ends.enter_context(
            _following_imports(
                {
                    "transformers.trainer": self._follow_transformers,
                    "lightning.pytorch.trainer.trainer": self._follow_lightning,
                    "pytorch_lightning.trainer.trainer": self._follow_old_lightning,
                }
            )
        )
        self._ends.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        self._ends.close()
        if not (self.plans or self._has_stepped or self.has_ended_script):
            asked = "--budget" if self._device is None else "--device"
            self._say(f"brimful: no plan was applied: nothing was trained. {asked} {_TRAINERS}.")

    def _follow_transformers(self, module: ModuleType) -> None:
        own: Callable[..., Any] = module.Trainer.train

        @wraps(own)
        def train(trainer: Any, *args: Any, **named: Any) -> Any:
            from brimful.integrations.transformers import AppliedPlan, apply, plan

            if any(isinstance(each, AppliedPlan) for each in trainer.callback_handler.callbacks):
                return own(trainer, *args, **named)  # planned already, by an earlier call or by the script
            whole = _WHOLE_BATCHES.format(self._budget, trainer.args.train_batch_size)
            with self._planning(if_not_divided=whole):
                if named.get("trial") is not None or len(args) > 1:
                    raise UsageError(
                        "a search for hyperparameters changes what each trial trains, and a plan is for one "
                        "trial. Run the search without --budget, or call train() with one trial's arguments."
                    )
                found = plan(trainer, self._device or str(trainer.args.device), budget=self._budget)
                applied = apply(self._shown(found), trainer, report=False)
            with self._refusing(EquivalenceError):  # which the first step finds
                result = own(trainer, *args, **named)
            self._say(applied.report_text())
            return result

        self._ends.callback(replace_attribute(module.Trainer, "train", train))

    def _follow_lightning(self, module: ModuleType) -> None:
        own: Callable[..., Any] = module.Trainer.fit

        @wraps(own)
        def fit(trainer: Any, *args: Any, **named: Any) -> Any:
            from brimful.integrations.lightning import PlanAtStart, PlanCallback, plan_as_set_up

            if any(isinstance(each, PlanCallback) for each in trainer.callbacks):
                return own(trainer, *args, **named)  # by the script itself

            def planned(trainer: Any, lightning_module: Any) -> Plan:
                with self._planning():
                    return self._shown(plan_as_set_up(trainer, lightning_module, self._device, self._budget))

            at_start = PlanAtStart(planned)
            trainer.callbacks.append(at_start)
            try:
                with self._refusing(EquivalenceError):
                    return own(trainer, *args, **named)
            finally:
                at_start.remove(trainer)

        self._ends.callback(replace_attribute(module.Trainer, "fit", fit))

    def _follow_old_lightning(self, module: ModuleType) -> None:
        error = UsageError(
            "plans are made for lightning.Trainer, and the script trains with that of pytorch_lightning, the "
            "older name of the same package. Import lightning.pytorch instead."
        )

        def fit(*_args: Any, **_named: Any) -> NoReturn:
            self._end_by(error)

        self._ends.callback(replace_attribute(module.Trainer, "fit", fit))

    @contextmanager
    def _planning(self, if_not_divided: str = "") -> Iterator[None]:
        """What plans and applies: nothing of it is watched, and an error of it ends the script.

        `if_not_divided` is shown after the error of a batch that must stay whole.
        """
        with self._refusing(BrimfulError), self._refusing(EquivalenceError, if_not_divided), undisturbed():
            self._is_planning = True
            try:
                yield
            finally:
                self._is_planning = False

    @contextmanager
    def _refusing(self, kind: type[BrimfulError], way_out: str = "") -> Iterator[None]:
        try:
            yield
        except kind as error:
            try:
                self._end_by(error)
            finally:
                if way_out:
                    self._say(way_out)

    def _end_by(self, error: BrimfulError) -> NoReturn:
        self.has_ended_script = True
        self._refuse(error)

    def _shown(self, plan: Plan) -> Plan:
        self.plans.append(plan)
        self._say(str(plan))
        if self._device is not None:
            self.has_ended_script = True
            raise SystemExit(0)
        return plan

    def _after_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        """Say which lines plan a loop of the script's own, after its first step."""
        if self._has_stepped or self.plans or self._is_planning:  # as calibration does
            return
        first = next((each for group in optimizer.param_groups for each in group["params"]), None)
        if isinstance(first, FakeTensor):
            return
        self._has_stepped = True
        if self._device is not None:
            self._end_by(
                UsageError(
                    f"--device plans a transformers.Trainer or a lightning.Trainer for {self._device}. The "
                    "script has stepped an optimizer of its own: what is around its steps cannot be captured. "
                    f'Describe the loop as a bf.Job, and call bf.estimate(job, "{self._device}").'
                )
            )
        self._say(_lines_to_write(optimizer, sys._getframe(), self._budget))


def _lines_to_write(optimizer: Optimizer, frame: FrameType | None, budget: str | None) -> str:
    """What plans a loop of the script's own, with the names that the loop has for what a plan needs."""
    while frame is not None and not is_users_own(frame.f_code.co_filename):
        frame = frame.f_back
    names, where = {}, "the script"
    if frame is not None:
        names = {**frame.f_globals, **locals_of(frame)}
        names |= {f"self.{name}": value for name, value in getattr(names.get("self"), "__dict__", {}).items()}
        where = f"{shown_file(frame.f_code.co_filename)}:{frame.f_lineno}"
    parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}

    def name_of(is_meant: Callable[[Any], bool], otherwise: str) -> str:
        for name, value in names.items():
            with suppress(Exception):  # of the value's own code, as of a property
                if is_meant(value):
                    return name
        return otherwise

    def is_trained(value: Any) -> bool:
        return isinstance(value, nn.Module) and parameters <= {id(each) for each in value.parameters()}

    model = name_of(is_trained, "model")
    own = name_of(lambda value: getattr(value, "optimizer", value) is optimizer, "optimizer")
    loader = name_of(lambda value: isinstance(value, DataLoader), "loader")
    size = getattr(names.get(loader), "batch_size", None) or "..."
    kind, defaults = type(optimizer), optimizer.defaults
    takes = inspect.signature(kind).parameters.items()
    given = [f"{name}={defaults[name]!r}" for name, at in takes if defaults.get(name, at.default) != at.default]
    package = "torch.optim" if kind.__module__.startswith("torch.optim") else kind.__module__
    return f"""brimful: no plan was applied, and the script runs outside of the budget of {budget}.
  --budget {_TRAINERS};
  {where} steps an optimizer of its own. To plan it, write before the loop:
    import brimful as bf
    with torch.random.fork_rng():  # the loop draws what it draws without this
        batch = next(iter({loader}))
    job = bf.Job(
        model={model},
        loss=lambda model, batch: ...,  # the loss of a batch, as the loop computes it
        batch=batch,
        optimizer=lambda parameters: {package}.{kind.__name__}({", ".join(("parameters", *given))}),
    )
    plan = bf.plan(job, global_batch_size={size}, budget="{budget}")
    step = bf.apply(plan, job, {model}, {own})
  and in the loop, in place of forward, backward and update:
    outcome = step(batch)  # outcome.loss"""


@contextmanager
def _following_imports(functions: dict[str, Callable[[ModuleType], None]]) -> Iterator[None]:
    """Call a function with each of these modules once it is imported, while the context is open."""
    for name, function in functions.items():
        if name in sys.modules:
            function(sys.modules[name])
    finder = _Follower(functions)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Follower(MetaPathFinder):
    """Finds modules as the other finders do, and calls a function with each that it has one for."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._functions, self._is_finding = functions, False

    def find_spec(self, name: str, _path: object, _target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, whose loader then calls the function."""
        function = self._functions.get(name)
        if function is None or self._is_finding:
            return None
        self._is_finding = True
        try:
            spec = find_spec(name)
        finally:
            self._is_finding = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                function(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
