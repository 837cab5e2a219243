"""What a caller changes in the module between steps: taken up by every method, or refused; never lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import load, micro_batches, weights
from tests.model.streaming import streamed

RESIDENT_ONLY = ("adamw", "sgd", "galore")
SETTINGS: dict[str, dict[str, Any]] = {"lsp": {"d": 16, "r": 2, "learn": False}}


def make(name: str, away: bool = False, **settings: Any) -> Any:
    """The method, on a resident or a streamed model."""
    if "lora" in name:
        pytest.importorskip("peft")
    return METHODS[name].load()(streamed(load()) if away else load(), 1e-3, **SETTINGS.get(name, {}), **settings)


def up_proj(model: keyhole.Model) -> nn.Parameter:
    layer = model.module.model.layers[0].mlp.up_proj
    return getattr(layer, "base_layer", layer).weight


def by_add(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.add_(0.25)


def by_load(param: nn.Parameter) -> None:
    holder = nn.Module()
    holder.w = param
    holder.load_state_dict({"w": param.detach() + 0.25})


def by_data(param: nn.Parameter) -> None:
    param.data.add_(0.25)


WAYS = [by_add, by_load, by_data]


# The others are lomo and adamw but for the rule by which they update
@in_every_run(
    lambda name: name in ("zo", "lomo", "adamw") or name.endswith("streamed") and name[:5] not in ("adalo", "apoll")
)
@pytest.mark.parametrize("name", [*METHODS, *(f"{name} streamed" for name in METHODS if name not in RESIDENT_ONLY)])
def test_after_a_flush_a_change_by_hand_is_trained_on(name: str) -> None:
    """In whatever way it is made, an evaluation sees it, and the next step begins from it."""
    method = make(name.removesuffix(" streamed"), name.endswith("streamed"))
    model, (seen,) = method.model, micro_batches(3, 1)
    for t, way in enumerate(WAYS):
        method.step(micro_batches(t, 1))
        method.flush()
        before, loss = up_proj(model).detach().clone(), model.nll(seen)[0].sum()
        way(up_proj(model))
        assert model.nll(seen)[0].sum() != loss, way
        way(up_proj(model))
        method.step(micro_batches(t + 1, 1))
        method.flush()
        moved = up_proj(model).detach() - before
        assert torch.allclose(moved, torch.full_like(moved, 0.5), atol=0.05), way


@in_every_run(lambda name, away: away or name in ("zo", "lomo"))
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("name", ["zo", "lomo", "lsp", "adam-offload"])
def test_the_modules_state_dict_has_the_last_step(name: str, away: bool) -> None:
    """Without a flush, as people save it or keep an average of it; and load_state_dict is trained on."""
    settings = {"optimizer_on": "cpu"} if name == "lsp" else {}
    found, flushed = make(name, away, **settings), make(name, away, **settings)
    start = {key: value.clone() for key, value in flushed.model.module.state_dict().items()}
    for t in range(3):
        losses = [float(method.step(micro_batches(t, 1))) for method in (found, flushed)]
        assert losses[0] == losses[1]
        flushed.flush()
        kept = {key: value.clone() for key, value in found.model.module.state_dict().items()}
        assert all(torch.equal(kept[key], value) for key, value in flushed.model.module.state_dict().items())
        if t == 1:
            found.step(micro_batches(t, 1))
            flushed.step(micro_batches(t, 1))
            flushed.flush()
            for method in (found, flushed):
                method.model.module.load_state_dict(start)
    left, right = weights(found.model), weights(flushed.model)
    assert all(torch.equal(left[key], right[key]) for key in right)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("name", ["zo", "lsp", "adam-offload"])
def test_a_change_while_an_update_is_on_its_way_is_refused(name: str, away: bool) -> None:
    """The update would overwrite it, or be added to it. After a flush, the caller writes the weights again."""
    method = make(name, away, **({"optimizer_on": "cpu"} if name == "lsp" else {}))
    ask = (lambda: method.step(micro_batches(1, 1)), method.flush, lambda: weights(method.model))
    for use in ask:
        method.step(micro_batches(0, 1))
        by_add(up_proj(method.model))
        with pytest.raises(UserError, match=r"up_proj.weight was changed by hand while the last step of .* flush\(\)"):
            use()
        method.flush()
        by_add(up_proj(method.model))
        method.step(micro_batches(2, 1))
        method.flush()


@pytest.mark.parametrize("name", ["lomo", "adalomo", "apollo-mini", *RESIDENT_ONLY])
def test_methods_that_defer_nothing_take_a_change_at_any_time(name: str) -> None:
    """Without a flush, and streamed as resident."""
    found = []
    for away in (False,) if name in RESIDENT_ONLY else (False, True):
        method = make(name, away)
        method.step(micro_batches(0, 1))
        before = up_proj(method.model).detach().clone()
        by_add(up_proj(method.model))
        method.step(micro_batches(1, 1))
        assert abs(float((up_proj(method.model).detach() - before).mean()) - 0.25) < 0.05
        found.append(weights(method.model))
    assert all(torch.equal(found[0][key], found[-1][key]) for key in found[0])


def test_backward_trains_on_what_was_changed_between() -> None:
    """In a loop of the user's own, where a clamp or a moving average writes weights after every update."""
    for way in (by_add, by_load):
        method = make("adam-offload")
        for t in range(2):
            method.backward(plain_loss(method.model.module, micro_batches(t, 1)))
            before = up_proj(method.model).detach().clone()
            way(up_proj(method.model))
        method.backward(plain_loss(method.model.module, micro_batches(2, 1)))
        assert abs(float((up_proj(method.model).detach() - before).mean()) - 0.25) < 0.05


def test_a_state_that_is_saved_after_a_change_holds_it() -> None:
    """The masters are what a resumed run starts from."""
    method = make("adam-offload")
    method.step(micro_batches(0, 1))
    method.flush()
    by_data(up_proj(method.model))
    state, wanted = method.state_dict(), weights(method.model)
    other = make("adam-offload")
    other.load_state_dict(state)
    assert all(torch.equal(wanted[key], now) for key, now in weights(other.model).items())


def test_adapters_know_that_their_base_was_changed() -> None:
    """A state that is saved after it does not fit the original model."""
    method = make("lora")
    method.state_dict()
    by_add(up_proj(method.model))
    with pytest.raises(UserError, match="not the weights that the adapters were trained on"):
        make("lora").load_state_dict(method.state_dict())


def test_weights_with_factors_beside_them_are_not_changed_by_hand() -> None:
    """What was learned would be added to the new weights; weights without factors may change."""
    method = make("zo", rank=2)
    method.step(micro_batches(0, 1))
    method.flush()
    with torch.no_grad():
        method.model.module.lm_head.weight.mul_(0.5)
    method.step(micro_batches(1, 1))
    method.flush()
    by_add(up_proj(method.model))
    with pytest.raises(UserError, match="up_proj.weight was changed by hand, but the low-rank factors"):
        method.step(micro_batches(2, 1))


def by_backup(module: nn.Module) -> Callable[[], None]:
    """A moving average takes the place of the weights; the function returned puts them back."""
    average, backup = {n: p.data * 0.5 for n, p in module.named_parameters()}, {}
    for name, param in module.named_parameters():
        backup[name], param.data = param.data, average[name]

    def back() -> None:
        for name, param in module.named_parameters():
            param.data = backup[name]

    return back


def by_dtype(module: nn.Module) -> Callable[[], None]:
    backup = {param: param.data for param in module.parameters()}
    module.half()

    def back() -> None:
        for param, data in backup.items():
            param.data = data

    return back


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("put", [by_backup, by_dtype])
def test_parameters_that_point_elsewhere_are_refused(put: Callable, away: bool) -> None:
    """Nothing is overwritten; after the caller has pointed them back, training goes on from them."""
    method = make("adam-offload", away)
    method.step(micro_batches(0, 1))
    method.flush()
    wanted = weights(method.model)
    back = put(method.model.module)
    for use in (lambda: method.model.nll(micro_batches(1, 1)), lambda: method.step(micro_batches(1, 1)), method.flush):
        with pytest.raises(UserError, match=r"was pointed to other memory .*param.copy_\(..\)"):
            use()
    back()
    assert all(torch.equal(wanted[key], now) for key, now in weights(method.model).items())
    method.step(micro_batches(1, 1))


def resize(model: keyhole.Model) -> None:
    model.module.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)


def replace_parameter(model: keyhole.Model) -> None:
    model.module.lm_head.weight = nn.Parameter(model.module.lm_head.weight.detach().clone())


def replace_module(model: keyhole.Model) -> None:
    layer = model.module.model.layers[0].mlp
    layer.up_proj = nn.Linear(layer.up_proj.in_features, layer.up_proj.out_features, bias=False)


def add_parameter(model: keyhole.Model) -> None:
    model.module.model.layers[1].mlp.scale = nn.Parameter(torch.ones(1))


def add_module(model: keyhole.Model) -> None:
    model.module.model.layers[0].adapter = nn.Linear(2, 2)


@pytest.mark.parametrize("use", ["step", "save", "flush", "make"])
@pytest.mark.parametrize("change", [resize, replace_parameter, replace_module, add_parameter, add_module])
def test_a_parameter_that_is_no_longer_or_newly_in_the_module_is_refused(
    change: Callable, use: str, tmp_path: Any
) -> None:
    """It would be computed with, and neither trained nor saved."""
    method = make("lomo")
    method.step(micro_batches(0, 1))
    change(method.model)
    says = "was (replaced or resized|added to the module) after keyhole.load, and (the new weights )?would be neither"
    with pytest.raises(UserError, match=says):
        if use == "step":
            method.step(micro_batches(1, 1))
        elif use == "save":
            method.model.save_pretrained(tmp_path / "out")
        elif use == "flush":
            method.flush()
        else:
            keyhole.LOMO(method.model, 1e-2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["zo", "lomo", "adam-offload"])
def test_averaged_weights_are_evaluated_in_place_of_the_trained_ones(name: str) -> None:
    """The usual moving average: parameters point to it for an evaluation by the module, and back; training goes on as
    if nothing had happened."""
    method, other = make(name), make(name)
    rows, found = micro_batches(5, 1)[0], []
    for step in range(3):
        for one in (method, other):
            one.step(micro_batches(step, 1))
            one.flush()
        params = dict(method.model.module.named_parameters())
        backup = {key: param.data for key, param in params.items()}
        shadow = {key: 0.5 * param.data for key, param in params.items()}
        for key, param in params.items():
            param.data = shadow[key]
        with torch.no_grad():
            found.append(method.model.module(input_ids=rows["input_ids"]).logits)
        for key, param in params.items():
            param.data = backup[key]
        with torch.no_grad():
            assert not torch.equal(found[-1], method.model.module(input_ids=rows["input_ids"]).logits)
        assert all(torch.equal(shadow[key], 0.5 * value) for key, value in backup.items())
    ours, theirs = weights(method.model), weights(other.model)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_gradients_that_were_left_in_adapters_are_refused() -> None:
    """They would be added to those of the step."""
    method = make("lora")
    method.step(micro_batches(0, 1))
    method.flush()
    plain_loss(method.model.module, micro_batches(1, 1)).backward()
    with pytest.raises(UserError, match=r"has left some in .*lora_A"):
        method.step(micro_batches(2, 1))
    method.model.module.zero_grad()
    method.step(micro_batches(2, 1))
