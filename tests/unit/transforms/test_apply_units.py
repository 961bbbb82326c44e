"""Putting unit actions in force changes nothing that others see of a model, and can be undone."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from brimful.batches import tensors_in
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Action, Settings, UnitAction
from brimful.transforms import apply_units


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


class OwnSequential(nn.Sequential):
    """Runs its children twice."""

    def forward(self, input):
        return super().forward(super().forward(input))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
        self.twice = OwnSequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.twice(self.body(self.stem(x))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def settings(*recomputed, kept=()):
    actions = [UnitAction(fqn=fqn, action=Action.RECOMPUTE) for fqn in recomputed]
    actions += [UnitAction(fqn=fqn, action=Action.KEEP) for fqn in kept]
    return Settings(micro_batch_size=1, units=tuple(actions))


UNITS = ("stem", "body[0..2]", "body[3..4]", "head")


def instance_dicts(model):
    """The `__dict__` of every module, one level deep."""
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def train_once(model):
    model(torch.ones(3, 4)).sum().backward()


def test_parameters_state_dict_and_classes_stay(net):
    before = {name: type(module) for name, module in net.named_modules()}
    state, parameters = net.state_dict(), [*net.parameters()]
    apply_units(net, settings(*UNITS))
    assert {name: type(module) for name, module in net.named_modules()} == before
    assert list(net.state_dict()) == list(state)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    net.load_state_dict(state)


def test_what_is_recomputed_is_listed_and_what_is_kept_is_left_alone(net):
    applied = apply_units(net, settings("stem", kept=("head",)))
    assert applied.units == ("stem",)
    assert applied.model is net
    assert "forward" not in net.head.__dict__


@pytest.mark.parametrize("trained", [False, True])
def test_remove_leaves_every_instance_as_it_was(net, trained):
    if trained:  # so that training changes no more of the instances' own attributes
        train_once(net)
    before = instance_dicts(net)
    applied = apply_units(net, settings(*UNITS))
    assert instance_dicts(net) != before
    if trained:
        train_once(net)
    applied.remove()
    assert instance_dicts(net) == before


def test_remove_twice_does_nothing_the_second_time(net):
    first = apply_units(net, settings("stem"))
    first.remove()
    second = apply_units(net, settings("stem"))
    first.remove()
    assert "forward" in net.stem.__dict__
    second.remove()
    assert "forward" not in net.stem.__dict__


def test_a_forward_that_was_set_on_the_instance_is_called_and_given_back(net):
    own = Doubling().forward
    net.stem.forward = own
    applied = apply_units(net, settings("stem"))
    x = torch.ones(3, 4, requires_grad=True)
    assert torch.equal(net.stem(x), 2 * x)
    applied.remove()
    assert net.stem.__dict__["forward"] is own


def test_applying_twice_is_refused_and_the_first_stays_in_force(net):
    apply_units(net, settings("stem"))
    before = instance_dicts(net)
    with pytest.raises(UsageError, match="'stem' is recomputed already"):
        apply_units(net, settings("head", "stem"))
    with pytest.raises(UsageError, match="recomputed already"):
        apply_units(net, settings("head", "stem"))
    assert instance_dicts(net) == before


@pytest.mark.parametrize(
    ("units", "error", "message"),
    [
        (("head", "stme"), UnknownNameError, "unknown unit 'stme'. Nearest: stem"),
        (("head", "layer[0..1]"), UnknownNameError, "unknown unit 'layer[0..1]'"),
        (("head", "body[0..7]"), UnknownNameError, "made for another model"),
        (("head", "body[3..1]"), UnknownNameError, "made for another model"),
        (("head", "stem[0..1]"), UsageError, "not a plain Sequential"),
        (("head", "twice[0..1]"), UsageError, "not a plain Sequential"),
        (("head", "body[0..2]", "body[2..3]"), UsageError, "overlap"),
        (("head", "body", "body[0..1]"), UsageError, "named twice"),
        (("head", "head"), UsageError, "named twice"),
    ],
)
def test_units_that_cannot_be_meant_are_refused_and_the_model_stays_as_it_was(net, units, error, message):
    before = instance_dicts(net)
    with pytest.raises(error) as caught:
        apply_units(net, settings(*units))
    assert message in str(caught.value)
    assert instance_dicts(net) == before


def test_a_run_may_end_in_a_child_that_occurs_twice(net):
    """`named_children` leaves out the second occurrence; the run's names are the Sequential's own."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu)
    x = torch.randn(2, 4)
    expected = model(x)
    apply_units(model, settings("[0..3]"))
    assert torch.equal(model(x), expected)


def test_hooks_of_a_unit_fire_once_and_those_inside_once_more_for_the_recomputation(net):
    calls = []
    net.body.register_forward_pre_hook(lambda *_: calls.append("body before"))
    net.body.register_forward_hook(lambda *_: calls.append("body"))
    net.body[2].register_forward_hook(lambda *_: calls.append("inside a run"))
    net.head.register_forward_hook(lambda *_: calls.append("head"))
    net.head.register_full_backward_hook(lambda *_: calls.append("head backward"))
    apply_units(net, settings("body[0..3]", "head"))
    value = net(torch.ones(3, 4)).sum()
    assert calls == ["body before", "inside a run", "body", "head"]
    value.backward()
    assert calls[4:] == ["head backward", "inside a run"]


def test_a_forward_hook_may_change_what_a_unit_returns(net):
    net.stem.register_forward_hook(lambda _module, _args, output: output * 3)
    expected = net.stem(torch.ones(1, 4))
    apply_units(net, settings("stem"))
    assert torch.equal(net.stem(torch.ones(1, 4)), expected)


def test_a_sequential_is_called_by_keyword_as_before(net):
    x = torch.ones(3, 4)
    expected = copy.deepcopy(net).body(input=x)
    apply_units(net, settings("body[0..2]"))
    assert torch.equal(net.body(input=x), expected)


def test_children_changed_after_applying_are_refused_instead_of_ignored(net):
    apply_units(net, settings("body[0..2]"))
    net.body[3] = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="apply the plan again"):
        net(torch.ones(3, 4))


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("by", COPIES)
def test_a_copy_of_an_applied_model_recomputes_by_itself(net, by, trained):
    """The copy's stand-ins call the copy's forwards and guard the copy's buffers."""
    apply_units(net, settings(*UNITS))
    if trained:  # so that there is everything that a step leaves
        train_once(net)
        net.zero_grad()
        net.body[1].reset_running_stats()
    other = COPIES[by](net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    train_once(other)
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert net.head.weight.grad is None
    assert (net.body[1].num_batches_tracked, other.body[1].num_batches_tracked) == (0, 1)
    assert other.stem.forward.forward.__self__ is other.stem


@pytest.mark.parametrize("by", COPIES)
def test_a_copy_with_its_plan_can_be_undone(net, by):
    """The plan alone belongs to the model it was applied to; copied beside its model, to the copy."""
    plain = instance_dicts(net)
    applied = apply_units(net, settings(*UNITS))
    other, of_other = COPIES[by]((net, applied))
    applied.remove()
    assert "forward" in other.stem.__dict__
    of_other.remove()
    assert [d.keys() for d in instance_dicts(other).values()] == [d.keys() for d in plain.values()]
    train_once(other)


def test_a_copy_saves_ops_by_itself(net):
    unit = UnitAction(fqn="body", action=Action.SAVE, saved=("addmm#1",))
    apply_units(net, Settings(micro_batch_size=1, units=(unit,)))
    train_once(net)
    other = pickle.loads(pickle.dumps(net))
    train_once(other)
    other.zero_grad()
    train_once(other)
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_state_dicts_of_a_plain_and_an_applied_model_are_interchangeable(net):
    other = copy.deepcopy(net)
    apply_units(other, settings(*UNITS))
    train_once(other)
    net.load_state_dict(saved_and_loaded(other.state_dict()))
    other.load_state_dict(net.state_dict())
    for name, value in other.state_dict().items():
        assert torch.equal(value, net.state_dict()[name])


@pytest.mark.parametrize("attribute", ["module", "_orig_mod"])
def test_the_error_for_a_wrapper_names_what_to_apply_the_plan_to(net, attribute):
    """As DistributedDataParallel and `torch.compile` wrap a model."""
    wrapper = nn.ModuleDict({attribute: net})
    with pytest.raises(UnknownNameError, match=f"apply the plan to its `.{attribute}`"):
        apply_units(wrapper, settings("stem"))


def test_hooks_of_every_kind_see_what_they_saw_before(net):
    """The same calls in the same order with the same values; modules inside a unit are tested above."""

    def watched(model):
        seen = []
        for name in ("stem", "body", "head"):
            module = getattr(model, name)
            note = lambda kind, name=name: lambda _module, *values: seen.append((kind, name, values))  # noqa: E731
            module.register_forward_pre_hook(note("before"))
            module.register_forward_hook(note("after"))
            module.register_full_backward_pre_hook(note("backward before"))
            module.register_full_backward_hook(note("backward after"))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: seen.append(("gradient", "", p.grad.clone()))
            )
        model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        return seen

    other = copy.deepcopy(net)
    apply_units(other, settings("stem", "body", "head"))
    expected, found = watched(net), watched(other)
    assert [entry[:2] for entry in expected] == [entry[:2] for entry in found]
    for one, two in zip(expected, found, strict=True):
        for left, right in zip(tensors_in(one), tensors_in(two), strict=True):
            assert torch.equal(left, right)
