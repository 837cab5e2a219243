"""Loops of the user's own: backward(loss) on what the module computed, and torch's schedulers over any method."""

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.base import Shared
from keyhole.methods.lsp.method import LSP
from keyhole.model.structure import layout
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import load, micro_batches, weights
from tests.methods.lsp.loops import EPS, SMALL, near
from tests.model.streaming import streamed

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.99, "eps": EPS}
SUBSPACE = SMALL | {"lr": 1e-2, "eps": EPS, "learn": False}
METHODS_WITH_BACKWARD = [
    (AdamOffload, ADAM),
    (AdamOffload, ADAM | {"max_grad_norm": 0.5}),
    (AdamOffload, ADAM | {"schedule": "monolithic"}),
    (LSP, SUBSPACE | {"optimizer_on": "gpu"}),
    (LSP, SUBSPACE | {"optimizer_on": "cpu"}),
    (LSP, SUBSPACE | {"optimizer_on": "cpu", "max_grad_norm": 0.1}),
]


def trained(cls: type, options: dict[str, Any], by_backward: bool, name: str = "qwen2") -> dict[str, torch.Tensor]:
    model = load(name)
    method = cls(model, **options)
    for t in range(4):
        method.lr = 1e-2 * (1 - t / 10)
        if by_backward:
            method.backward(plain_loss(model.module, micro_batches(t, 1)))
            assert all(p.grad is None for p in model.module.parameters())
        else:
            method.step(micro_batches(t, 1))
    method.flush()
    found = weights(model)
    method.close()
    return found


@in_every_run(lambda cls, options, chunks: chunks or (cls is AdamOffload and options == ADAM))
@pytest.mark.parametrize(("cls", "options"), METHODS_WITH_BACKWARD)
@pytest.mark.parametrize("chunks", [False, True])
def test_backward_is_step(cls: type, options: dict[str, Any], chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same updates from the module's own loss, tied weights once, tables in one piece or several: adam-offload to
    the bit where the vocabulary is one chunk, as in the module's own loss."""
    if chunks:
        monkeypatch.setattr(layout, "CHUNK_ROWS", 40)
    for name in ("qwen2",) if chunks else ("qwen2", "llama"):
        expected, found = (trained(cls, options, by_backward, name) for by_backward in (False, True))
        exact = cls is AdamOffload and not chunks  # lsp compresses factors in a step, and gradients here
        for key in expected:
            assert torch.equal(found[key], expected[key]) if exact else near(found[key], expected[key]), (name, key)


def test_given_the_same_gradients_the_bits_are_those_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs is the order of sums in the module's own backward; the update is the same code."""
    for cls, options in ((AdamOffload, ADAM), (LSP, SUBSPACE | {"optimizer_on": "gpu", "others": "adam"})):
        model, twin = load("llama"), load("llama")
        method, other = cls(model, **options), cls(twin, **options)
        sink = method if cls is AdamOffload else method.updates
        grads: dict[str, torch.Tensor] = {}
        gradient, linear = sink.gradient, sink.linear

        def keep(tensor: Any, w: Any, grad: torch.Tensor, then: Any = gradient, grads: dict = grads) -> None:
            grads[tensor.name] = grad.clone()
            then(tensor, w, grad)

        monkeypatch.setattr(sink, "gradient", keep)
        monkeypatch.setattr(sink, "linear", lambda *args: False)
        method.step(micro_batches(0, 1))
        loss = plain_loss(twin.module, micro_batches(0, 1))
        named = dict(twin.module.named_parameters())
        hooks = [p.register_hook(lambda g, n=n, grads=grads: grads.get(n, g)) for n, p in named.items()]
        other.backward(loss)
        method.flush()
        assert len(hooks) == len(named) and set(grads) <= set(named) and linear is not None
        ours, theirs = weights(model), weights(twin)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_projectors_are_learned_on_the_loss_of_the_user() -> None:
    """In the first step, of every matrix, before anything moves."""
    model = load("llama")
    method = LSP(model, **SUBSPACE | {"learn": True, "optimizer_on": "gpu"})
    method.backward(plain_loss(model.module, micro_batches(0, 1)))
    matrices = [target for target in method.targets.values() if target.p is not None]
    assert matrices and all(target.generation == 1 for target in matrices)
    assert set(method.check.biases) == {target.name for target in matrices} and 0 < method.metrics()["bias"] < 1


@pytest.mark.parametrize(("cls", "options"), [(AdamOffload, ADAM), (LSP, SUBSPACE)])
def test_backward_is_refused_where_it_cannot_be_exact(cls: type, options: dict[str, Any]) -> None:
    """Streamed weights, and a loss without a graph."""
    model = load("llama")
    with pytest.raises(UserError, match="no graph"):
        cls(model, **options).backward(torch.ones(()))
    away = cls(streamed(load("llama")), **options)
    with pytest.raises(UserError, match="call step"):
        away.backward(torch.ones((), requires_grad=True))


SCHEDULERS = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4),
}


@in_every_run(lambda name, kind: kind == next(iter(SCHEDULERS)) or name in ("zo", "lomo", "adamw"))
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("name", METHODS)
def test_torch_s_schedulers_set_the_rate_of_every_method(name: str, kind: str) -> None:
    """Three steps at the rates that torch gives to an optimizer of its own."""
    row = METHODS[name]
    own = row.settings()
    if name == "lora":
        pytest.importorskip("peft")
    model = keyhole.load(load("llama").config, init="random", device="cpu")
    method = row.load().make(model, Shared(learning_rate=1e-3), row.fill(own))
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=method.lr)
    ours, theirs = SCHEDULERS[kind](method.torch_optimizer), SCHEDULERS[kind](plain)
    rates, expected = [], []
    for t in range(3):
        method.step(micro_batches(t, 1))
        plain.step()
        rates.append(method.rate)
        expected.append(plain.param_groups[0]["lr"])
        ours.step()
        theirs.step()
    assert rates == expected and rates[0] > rates[1] > rates[2]
    assert method.param_groups is method.torch_optimizer.param_groups and method.param_groups[0]["params"]


def test_a_scheduler_drives_backward_too() -> None:
    """The rate of the group is that of the next backward."""
    model = load("llama")
    method = AdamOffload(model, **ADAM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(method.torch_optimizer, lambda step: 0.5**step)
    for t in range(3):
        method.backward(plain_loss(model.module, micro_batches(t, 1)))
        assert method.lr == method.current.lr == 1e-2 * 0.5**t
        scheduler.step()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("lomo", "max_grad_norm", -1.0),
        ("lomo", "max_grad_norm", 0),
        ("lomo", "weight_decay", -0.1),
        ("lomo", "weight_decay", float("inf")),
        ("lomo", "seed", -1),
        ("lomo", "clip_value", float("nan")),
        ("lomo", "fused", "no"),
        ("adamw", "beta2", 1.0),
        ("adam-offload", "eps", "1e-8"),
        ("sgd", "momentum", True),
        ("zo", "clip", -1.0),
        ("zo", "directions", 1.5),
        ("zo", "distribution", "normal"),
        ("zo", "rank", 10**6),
    ],
)
def test_settings_have_types_and_bounds_without_a_config_too(name: str, key: str, value: Any) -> None:
    """A norm or a clip below 0 would turn the gradient round, a decay below 0 would make weights grow."""
    with pytest.raises(UserError, match=rf"{key}: found {value!r}, expected "):
        METHODS[name].load()(load("llama"), 1e-3, **{key: value})


@pytest.mark.parametrize(
    ("name", "key"),
    [("zo", "eps"), ("zo", "directions"), ("adamw", "weight_decay"), ("lomo", "max_grad_norm"), ("sgd", "momentum")],
)
def test_a_setting_that_is_written_into_a_method_is_refused(name: str, key: str) -> None:
    """The losses of zo would be taken at the new eps and divided by the old one; adamw would never read a decay."""
    method = METHODS[name].load()(load("llama"), 1e-3)
    with pytest.raises(UserError, match=f"{name}: {key} cannot be changed"):
        setattr(method, key, 0.5)
    with pytest.raises(UserError, match="learning_rate cannot be changed, .*: it is called lr here"):
        method.learning_rate = 0.5
    method.lr = 0.5


@pytest.mark.parametrize("batch", [None, 3])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(UserError, match=f"batch: found a {type(batch).__name__}"):
        keyhole.LOMO(load("llama"), 1e-3).step(batch)


def test_tokens_of_32_bits_are_tokens() -> None:
    """As numpy's and some tokenizers' are: the same step."""
    losses = []
    for dtype in (torch.int32, torch.int64):
        (batch,) = micro_batches(0, 1)
        losses.append(float(keyhole.LOMO(load("llama"), 1e-3).step({k: x.to(dtype) for k, x in batch.items()})))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.AdamOffload])
@pytest.mark.parametrize("between", ["backward", "step"])
def test_a_loss_of_older_weights_is_refused(cls: type, between: str) -> None:
    """Its graph would be differentiated at weights that have moved. Torch refuses its own optimizers there, too."""
    model = load("llama")
    method = cls(model, 1e-2)
    one, other = (plain_loss(model.module, micro_batches(t, 1)) for t in (0, 1))
    method.backward(one) if between == "backward" else method.step(micro_batches(0, 1))
    with pytest.raises(UserError, match="the weights have changed since this loss was computed"):
        method.backward(other)
    method.backward(plain_loss(model.module, micro_batches(1, 1)))


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload])
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (3.0, "found one as a float"),
        (torch.ones(2, requires_grad=True), r"found one of shape \(2,\)"),
        (torch.ones(1, requires_grad=True).sum(), "no weight of this model received a gradient"),
    ],
)
def test_what_is_no_loss_of_the_model_is_refused(cls: type, loss: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        cls(load("llama"), 1e-2).backward(loss)


def test_an_error_before_the_first_gradient_leaves_no_trace() -> None:
    """The count of steps, by which moments are corrected, is that of updates."""
    found = []
    for fails in (False, True):
        model = load("llama")
        method = keyhole.AdaLOMO(model, 1e-2)
        if fails:
            loss = plain_loss(model.module, micro_batches(0, 1))
            loss.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                method.backward(loss)
        method.step(micro_batches(0, 1))
        found.append(weights(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("rate", [-1.0, -1, float("nan")])
def test_a_rate_that_no_step_can_have_is_refused(rate: float) -> None:
    """Set on the method or in its group, after it was made."""
    by_group, by_name = keyhole.LOMO(load("llama"), 1e-2), keyhole.LOMO(load("llama"), 1e-2)
    by_group.param_groups[0]["lr"] = by_name.lr = rate
    for method in (by_group, by_name):
        with pytest.raises(UserError, match="is no learning rate"):
            method.step(micro_batches(0, 1))


@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.1), ("momentum", 0.9), ("betas", (0.9, 0.95))])
def test_a_setting_in_the_group_that_no_method_reads_is_refused(key: str, value: Any) -> None:
    """It would have no effect, and the weights would stay as they are until then."""
    model = load("llama")
    method, before = keyhole.LOMO(model, 1e-2), weights(model)
    method.param_groups[0][key] = value
    with pytest.raises(UserError, match=f"param_groups: {key} has no effect here"):
        method.step(micro_batches(0, 1))
    assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    del method.param_groups[0][key]
    method.step(micro_batches(0, 1))


@pytest.mark.parametrize("name", ["lomo", "adamw", "zo"])
@pytest.mark.parametrize("rate", [torch.tensor(-1.0), "3e-3", None, torch.ones(2)])
def test_what_is_no_number_is_no_rate(name: str, rate: Any) -> None:
    """Set on the method or in its group; a tensor with one number is one, as in torch."""
    method = METHODS[name].load()(load("llama"), 1e-3)
    method.lr = rate
    with pytest.raises(UserError, match="lr: .* is no learning rate"):
        method.step(micro_batches(0, 1))
    method.lr = torch.tensor(0.5)
    method.step(micro_batches(0, 1))
    assert method.lr == method.param_groups[0]["lr"] == 0.5
    method.param_groups[0]["lr"] = rate
    with pytest.raises(UserError, match="lr: .* is no learning rate"):
        method.step(micro_batches(0, 1))


def test_a_rate_that_was_refused_can_be_replaced() -> None:
    """Also where the group, which schedulers write to, exists already."""
    method = keyhole.LOMO(load("llama"), 1e-3)
    assert method.param_groups[0]["lr"] == 1e-3
    method.lr = "3e-3"
    with pytest.raises(UserError, match="lr: '3e-3' is no learning rate"):
        method.step(micro_batches(0, 1))
    method.lr = 0.5
    method.step(micro_batches(0, 1))
    assert method.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["zo", "lomo", "lomo-lora", "lora", "lsp", "adam-offload", "adamw", "sgd", "galore"])
def test_one_number_in_a_tensor_or_an_array_is_a_rate_from_the_start(name: str) -> None:
    """As for a rate that is set later."""
    for rate in (np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        assert METHODS[name].load()(load("llama"), rate).lr == 0.5


def test_parameters_that_are_taken_out_of_the_group_and_other_groups_are_refused() -> None:
    """They would be trained on, and the rate of another group would become that of all parameters."""
    changes: list[Any] = [
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups.append({"params": [], "lr": 1.0}),
        lambda groups: groups.clear(),
    ]
    for change in changes:
        method = keyhole.LOMO(load("llama"), 1e-3)
        change(method.param_groups)
        with pytest.raises(UserError, match="param_groups: groups or parameters were added or taken out"):
            method.step(micro_batches(0, 1))


def test_a_module_with_other_weights_than_were_loaded_is_refused() -> None:
    """What a caller has resized or replaced would be computed with, and neither trained nor saved."""
    resized, replaced = load("llama"), load("llama")
    resized.module.resize_token_embeddings(resized.config.vocab_size + 8, mean_resizing=False)
    norm = replaced.module.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    for model, name in ((resized, "(lm_head|model.embed_tokens).weight"), (replaced, "model.norm.weight")):
        with pytest.raises(UserError, match=f"model: {name} was replaced or resized after keyhole.load"):
            keyhole.LOMO(model, 1e-2)


def test_the_torch_optimizer_tells_what_it_does_not_do() -> None:
    """A loop that takes it for a real one would train nothing; a second group would be ignored."""
    model = load("llama")
    shell = keyhole.LOMO(model, 1e-2).torch_optimizer
    plain_loss(model.module, micro_batches(0, 1)).backward()
    with pytest.raises(UserError, match="has left gradients that it does not apply"):
        shell.step()
    with pytest.raises(UserError, match="add_param_group: a method trains the parameters of its model"):
        shell.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("method", [name for name in METHODS if name != "lora"])
@pytest.mark.parametrize("state", [{}, {"step_count": "many", "seed": None}, {"x": 1}, None], ids=str)
def test_a_state_of_something_else_is_refused(method: str, state: Any) -> None:
    """By name, and not with a KeyError; torch's methods, whose own state may be empty, took what is not theirs for
    nothing."""
    made = METHODS[method].load()(load("llama"), 1e-2)
    names = {"method": method, "tensors": made.model.layout.fingerprint}
    if state is not None and state | names == made.state_dict():  # of before a state had these
        made.load_state_dict(state)
        return
    with pytest.raises(UserError, match=f"{method}: |seed: |state"):
        made.load_state_dict(state)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [("adalomo", "lomo"), ("lomo", "zo"), ("adam-offload", "adamw"), ("adamw", "sgd"), ("sgd", "adamw")],
)
def test_the_state_of_another_method_is_refused(found: str, wanted: str) -> None:
    """Also where its names are those of the method: the moments would be dropped, or begin at 0, in silence."""
    made = METHODS[found].load()(load("llama"), 1e-3)
    made.step(micro_batches(0, 1))
    with pytest.raises(UserError, match=f"{wanted}: this is the state of another method, {found}"):
        METHODS[wanted].load()(load("llama"), 1e-3).load_state_dict(made.state_dict())
    older = {key: value for key, value in made.state_dict().items() if key != "method"}
    made.load_state_dict(older)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_method_is_not_copied(make: Any) -> None:
    """It is one with its model; the message says what can be copied."""
    method = keyhole.LOMO(load("llama"), 1e-3)
    with pytest.raises(UserError, match=r"lomo: .* not copied or pickled; .* load_state_dict"):
        make(method)
    with pytest.raises(UserError, match=r"torch_optimizer: .* not copied or pickled; save its state_dict"):
        make(method.torch_optimizer)


def test_a_model_is_not_copied() -> None:
    """By pickle, copy, or a library that copies what it is given."""
    model = load("llama")
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UserError, match="a model holds threads .* is not copied or pickled; load it again"):
            make(model)


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_model_is_saved_to_a_path(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name, as an unset variable leaves it, is not this directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="save_pretrained: found .*, expected the path of a directory"):
        load("llama").save_pretrained(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[1, 2]], "found a list, expected the tokens"),
        (torch.zeros(1, 0, dtype=torch.long), r"found \(1, 0\) of int64"),
        (torch.zeros(3, dtype=torch.long), r"found \(3,\) of int64"),
        (torch.zeros(1, 3), r"found \(1, 3\) of float32"),
        (torch.full((1, 3), 10**6), "holds 1000000 to 1000000; the model has tokens 0 to"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(ids: Any, says: str) -> None:
    """By generation and by logits."""
    model = load("llama")
    for use in (model.generate, lambda given: model.logits({"input_ids": given}), lambda given: model.logits([given])):
        with pytest.raises(UserError, match=f"{says}|batch: found a (int|Tensor), expected a dict"):
            use(ids)


@in_every_run(lambda name: name in ("zo", "lomo", "lsp", "adamw"))
@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_the_same_in_the_caller_s_no_grad_and_inference_mode(name: str) -> None:
    """Batches that were made there, too; the steps after it; and a model and a method that were made there, or flushed,
    or given a state."""
    if "lora" in name:
        pytest.importorskip("peft")
    found = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            model = load("llama")
            method = METHODS[name].load()(model, 1e-3, **({"d": 16, "r": 2} if name == "lsp" else {}))
            method.step([{key: x.clone() for key, x in batch.items()} for batch in micro_batches(0, 1)])
        method.step(micro_batches(1, 1))
        with mode():
            method.flush()
            method.load_state_dict(copy.deepcopy(method.state_dict()))
        method.step(micro_batches(2, 1))
        method.flush()
        found.append(weights(model))
    assert all(torch.equal(found[0][key], one[key]) for one in found for key in one)


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload])
def test_a_loss_that_a_scaler_has_multiplied_is_refused(cls: type) -> None:
    """Its factor, 65536, would be part of the update; with a division for accumulation around it, too. A weight of the
    user's own is a weight, and a scaler that is off does nothing."""
    model = load("llama")
    method, scaler = cls(model, 1e-3), torch.amp.GradScaler("cpu")
    for scaled in (scaler.scale, lambda loss: scaler.scale(loss) / 4, lambda loss: scaler.scale(loss * 0.5)):
        before = weights(model)
        with pytest.raises(UserError, match="a GradScaler has multiplied this loss"):
            method.backward(scaled(plain_loss(model.module, micro_batches(0, 1))))
        assert all(torch.equal(before[name], now) for name, now in weights(model).items())
    off = torch.amp.GradScaler("cpu", enabled=False)
    shares = (lambda loss: loss / 4, lambda loss: loss / torch.tensor(65536.0))  # as many tokens as the scaler's factor
    for kept in (off.scale, lambda loss: loss * torch.tensor(2.0), lambda loss: 65536.0 * loss, *shares):
        method.backward(kept(plain_loss(model.module, micro_batches(0, 1))))


@in_every_run(lambda name: name in ("zo", "lomo", "lsp", "adam-offload", "adamw"))
@pytest.mark.parametrize("name", [name for name in METHODS if name != "lora"])
def test_the_state_of_the_torch_optimizer_is_that_of_the_method(name: str, tmp_path: Path) -> None:
    """A loop that saves the optimizer and the scheduler, as loops do, goes on to the bit: moments, counts and rate."""
    if "lora" in name:
        pytest.importorskip("peft")
    own = {"d": 16, "r": 2} if name == "lsp" else {}
    runs = []
    for stops in (False, True):
        model = load("llama")
        method = METHODS[name].load()(model, 1e-3, **own)
        scheduler = SCHEDULERS["lambda"](method.torch_optimizer)
        for t in range(3):
            if stops and t == 2:
                kept = {"optimizer": method.torch_optimizer.state_dict(), "scheduler": scheduler.state_dict()}
                torch.save(kept, tmp_path / "state.pt")
                saved, model = weights(model), load("llama")
                with torch.no_grad():
                    for tensor in model.layout.tensors:
                        tensor.param.copy_(saved[tensor.name])
                method = METHODS[name].load()(model, 7.0, **own)
                scheduler = SCHEDULERS["lambda"](method.torch_optimizer)
                kept = torch.load(tmp_path / "state.pt", weights_only=True)
                method.torch_optimizer.load_state_dict(kept["optimizer"])
                scheduler.load_state_dict(kept["scheduler"])
            method.step(micro_batches(t, 1))
            scheduler.step()
        method.flush()
        runs.append((weights(model), method.param_groups[0]["lr"]))
    assert runs[0][1] == runs[1][1]
    if name != "lomo-lora":  # its weights are saved with the adapters added
        assert all(torch.equal(runs[0][0][key], runs[1][0][key]) for key in runs[0][0])


def test_a_torch_optimizer_s_state_that_would_lose_something_is_refused() -> None:
    """One that holds the rate only, as those of earlier versions, or that of torch or of another method."""
    shell = keyhole.AdamOffload(load("llama"), 1e-3).torch_optimizer
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    for state in ({"state": {}, "param_groups": shell.state_dict()["param_groups"]}, plain.state_dict(), None):
        with pytest.raises(UserError, match="this state is no method's, expected one"):
            shell.load_state_dict(state)
    with pytest.raises(UserError, match="this state is that of lomo, expected one"):
        shell.load_state_dict(keyhole.LOMO(load("llama"), 1e-3).torch_optimizer.state_dict())


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload, keyhole.AdamW])
def test_gradients_that_the_caller_has_left_are_refused(cls: type) -> None:
    """They were added to those of the step, silently. Cleared, also through the optimizer's own zero_grad, the step is
    that of its batch."""
    found = []
    for looks in (False, True):
        model = load("llama")
        method = cls(model, 1e-3)
        if looks:
            plain_loss(model.module, micro_batches(5, 1)).backward()
            with pytest.raises(UserError, match=r"gradients: loss.backward\(\) has left some in .*zero_grad"):
                method.step(micro_batches(0, 1))
            method.torch_optimizer.zero_grad()
        method.step(micro_batches(0, 1))
        method.flush()
        found.append(weights(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", ["lomo", "lsp", "adam-offload", "adamw"])
def test_a_step_with_everything_frozen_is_refused(name: str) -> None:
    """It would return a loss and train nothing; thawed again, the step goes on."""
    own = {"d": 16, "r": 2, "learn": False} if name == "lsp" else {}
    model = load("llama")
    method = METHODS[name].load()(model, 1e-3, **own)
    model.module.requires_grad_(False)
    with pytest.raises(UserError, match=f"all parameters were frozen after {name} was made"):
        method.step(micro_batches(0, 1))
    model.module.requires_grad_(True)
    method.step(micro_batches(0, 1))


@pytest.mark.parametrize("name", ["lomo", "adalomo", "lomo-lora"])
def test_blocks_may_be_frozen_before_the_first_step(name: str) -> None:
    """What begins later is frozen after the method was made, and hides no gradient."""
    model = load("llama")
    method = METHODS[name].load()(model, 1e-3)
    model.module.model.layers.requires_grad_(False)
    before = weights(model)
    method.step(micro_batches(0, 1))
    model.module.model.layers.requires_grad_(True)
    method.step(micro_batches(0, 1))
    assert not any(torch.equal(before[key], now) for key, now in weights(model).items())


@pytest.mark.parametrize(
    ("name", "saved", "made", "says"),
    [
        ("lsp", {"d": 16, "r": 2}, {"d": 8, "r": 2}, "does not fit: make the method as it was made"),
        ("lora", {"r": 4}, {"r": 8}, "does not fit: make the method as it was made"),
        ("zo", {"rank": 2, "fold": False}, {}, "learned low-rank factors, which would be lost"),
    ],
)
def test_the_state_of_other_settings_is_refused(
    name: str, saved: dict[str, Any], made: dict[str, Any], says: str
) -> None:
    """By a message of its own, and not by torch's alone; nothing that was learned is left out in silence."""
    method = METHODS[name].load()(load("llama"), 1e-3, **saved)
    method.step(micro_batches(0, 1))
    with pytest.raises(UserError, match=says):
        METHODS[name].load()(load("llama"), 1e-3, **made).load_state_dict(method.state_dict())


def test_a_wrong_setting_is_named_as_in_a_config() -> None:
    with pytest.raises(UserError, match=r"adam_offload\.beta1: found 1\.0, expected a number >= 0"):
        keyhole.AdamOffload(load("llama"), 1e-3, beta1=1.0)


@pytest.mark.parametrize("name", ["zo", "lomo", "lsp", "adam-offload", "adamw"])
def test_a_parameter_that_is_trained_only_later_is_refused(name: str) -> None:
    """The method was made without it. Frozen later, it stays as it is, or is refused by a method without gradients."""
    own = {"d": 16, "r": 2, "learn": False} if name == "lsp" else {}
    later, frozen = load("llama"), load("llama")
    later.module.model.norm.weight.requires_grad_(False)
    methods = [METHODS[name].load()(model, 1e-3, **own) for model in (later, frozen)]
    later.module.model.norm.weight.requires_grad_(True)
    with pytest.raises(UserError, match="norm.weight did not require gradients when .* was made, and would not be"):
        methods[0].step(micro_batches(0, 1))
    frozen.module.model.norm.weight.requires_grad_(False)
    before = weights(frozen)["model.norm.weight"]
    if name == "zo":
        with pytest.raises(UserError, match="norm.weight was frozen after zo was made, which would still change it"):
            methods[1].step(micro_batches(0, 1))
        return
    methods[1].step(micro_batches(0, 1))
    methods[1].flush()
    assert torch.equal(before, weights(frozen)["model.norm.weight"])


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload])
def test_a_gradient_hook_is_called_by_backward_and_refused_by_step(cls: type) -> None:
    """A step has gradients as factors and in chunks; the hook got None."""
    model = load("llama")
    method, calls = cls(model, 1e-3), []
    model.module.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: calls.append(grad.shape))
    with pytest.raises(UserError, match=r"up_proj.weight has a gradient hook \(register_hook\), which a step does not"):
        method.step(micro_batches(0, 1))
    method.backward(plain_loss(model.module, micro_batches(0, 1)))
    assert len(calls) == (2 if cls is keyhole.LSP else 1), "lsp learns its projectors from a pass of its own"


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.AdamOffload])
def test_a_hook_for_accumulated_gradients_is_refused(cls: type) -> None:
    """It would find none."""
    model = load("llama")
    method = cls(model, 1e-3)
    hook = model.module.model.norm.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(UserError, match="norm.weight has a hook of yours"):
        method.step(micro_batches(0, 1))
    with pytest.raises(UserError, match="norm.weight has a hook of yours"):
        method.backward(plain_loss(model.module, micro_batches(0, 1)))
    hook.remove()
    method.step(micro_batches(0, 1))


@pytest.mark.parametrize("cls", [keyhole.LOMO, AdamOffload])
def test_a_loss_is_differentiated_once(cls: type) -> None:
    """The second time is refused, and the loop goes on."""
    model = load("llama")
    method = cls(model, 1e-3)
    loss = plain_loss(model.module, micro_batches(0, 1))
    method.backward(loss)
    with pytest.raises(UserError, match=r"differentiated before, .* compute the loss again"):
        method.backward(loss)
    method.backward(plain_loss(model.module, micro_batches(1, 1)))


def test_what_autograd_computes_again_in_a_thread_of_its_own_is_part_of_the_step() -> None:
    """As a checkpoint around the whole module on a GPU. Here: a thread that differentiates while a step is made."""
    model = load("llama")
    method, (batch,) = keyhole.LOMO(model, 1e-3), micro_batches(0, 1)
    losses: list[float] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            losses.append(plain_loss(model.module, [batch]).item())
            return grad

    def from_another_thread(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=again.backward)
        thread.start()
        thread.join()

    again, loss = Again.apply(torch.ones((), requires_grad=True)), plain_loss(model.module, [batch])
    loss.register_hook(from_another_thread)
    method.backward(loss)
    assert losses == [loss.item()]


@pytest.mark.parametrize("name", ["adamw", "lomo", "zo"])
def test_one_thread_at_a_time_uses_a_model(name: str) -> None:
    """A step or an evaluation of another thread is refused while a step is under way; it is not mixed with it."""
    method, alone = (METHODS[name].load()(load("llama"), 1e-3) for _ in range(2))
    (batch,) = micro_batches(0, 1)
    refused: list[str] = []

    def use() -> None:
        for call in (method.step, method.model.nll, method.model.logits):
            try:
                call(batch)
            except UserError as error:
                refused.append(str(error))

    def from_another_thread(*args: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    hook = method.model.module.model.norm.register_forward_pre_hook(from_another_thread)
    losses = [float(method.step(batch))]
    assert len(refused) == 3 and all("another thread" in text for text in refused)
    losses.append(float(method.step(batch)))
    assert losses == [float(alone.step(batch)) for _ in range(2)]
