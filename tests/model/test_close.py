"""A model that is closed gives all back, whoever still holds it, and says so; several share a process."""

import copy
import gc
import pickle
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import keyhole
from keyhole.errors import UserError
from keyhole.machine.settings import memory_limit
from keyhole.methods import METHODS
from tests.model.decoders import DECODERS, batch, load
from tests.training.children import server

CASES = [("adamw", "resident"), ("zo", "stream"), ("lomo", "stream"), ("lsp", "stream"), ("adam-offload", "resident")]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What reference counts do not free stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def made(name: str, placement: str, **options: Any) -> tuple[keyhole.Model, Any]:
    model = load(options.pop("decoder", "llama"), placement=placement, workload=keyhole.Workload(name), **options)
    return model, METHODS[name].load()(model, 1e-3, **({"d": 16, "r": 2} if name == "lsp" else {}))


def state() -> tuple[object, ...]:
    """Of the process: what a model changes in it."""
    patched = (
        torch.nn.Module.register_parameter,
        torch.nn.Linear.forward,
        F.scaled_dot_product_attention,
    )
    generators = torch.get_rng_state().sum().item(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    return sorted(thread.name for thread in threading.enumerate()), patched, generators, torch.get_num_threads()


@pytest.mark.parametrize(("name", "placement"), CASES)
def test_all_is_given_back_and_every_call_refused(name: str, placement: str, tmp_path: Any) -> None:
    """Weights, state, threads and settings, though model, method and module are still held. Closing again is fine."""
    before = state()
    with made(name, placement, tf32=True)[0] as model:
        opt = METHODS[name].load()(model, 1e-3, **({"d": 16, "r": 2} if name == "lsp" else {}))
        for seed in range(2):
            opt.step([batch(seed=seed), batch(seed=seed + 2)])
        module, ids, scheduled = model.module, batch()["input_ids"], opt.torch_optimizer
        memory = [StorageWeakRef(home.untyped_storage()) for home in model.engine.homes]
        memory += [StorageWeakRef(x.untyped_storage()) for x in opt.state_dict().values() if torch.is_tensor(x)]
    model.close()
    assert state() == before and all(ref.expired() for ref in memory)
    calls: list[Callable[[], object]] = [lambda: opt.step(batch()), opt.flush, opt.state_dict, scheduled.state_dict]
    calls += [lambda: model.nll(batch()), lambda: model.logits(batch()), lambda: model.generate(ids), lambda: opt.lr]
    calls += [lambda: model.save_pretrained(tmp_path / "a"), lambda: module.save_pretrained(tmp_path / "b")]
    calls += [lambda: module(ids), lambda: module.model(ids), lambda: module.generate(ids), module.state_dict]
    calls += [lambda: module.load_state_dict({}), lambda: keyhole.ZO(model, 1e-3), lambda: dict(model.named_tensors())]
    for call in calls:
        with pytest.raises(UserError, match="the model was closed"):
            call()
    assert not list(tmp_path.iterdir()) and "closed" in f"{model!r} {opt!r}" and not hasattr(model, "module")


def test_what_is_deferred_is_applied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that somebody holds is of the last step; a step that cannot be applied is told, and nothing is kept."""
    (closed, a), (flushed, b) = made("zo", "resident"), made("zo", "resident")
    for opt in (a, b):
        opt.step(batch())
    held, theirs = closed.layout.tensors[0].param.detach(), flushed.layout.tensors[0].param
    assert not torch.equal(held, theirs) or a.is_settled is False
    closed.close()
    b.flush()
    assert torch.equal(held, theirs)
    monkeypatch.setattr(flushed.engine, "wait_for_homes", lambda: 1 / 0)
    with pytest.warns(UserWarning, match="the last step is not in the weights: division"):
        flushed.close()
    assert repr(flushed) == "<Model: closed>"


@pytest.mark.parametrize("name", [None, "lomo"])
def test_weights_that_another_loop_took_over_are_no_lost_step(name: str | None) -> None:
    """Parameters that were pointed elsewhere, as by a plain loop beside, are nothing to warn of at the end."""
    model, opt = (load("llama"), None) if name is None else made(name, "resident")
    if opt is not None:
        opt.step(batch())
    for param in model.module.parameters():
        param.data = param.data.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.close()


FAILING = {
    "load": "model = keyhole.load(model.config, device='cpu')",
    "make": "keyhole.LOMO(model, lr=-1)",
    "step": "opt.step({'input_ids': torch.tensor([[1, 2, 10**6]])})",
    "inside": "opt.step(lambda: model.nll(batch())[0].sum() + torch.ones(2, 3) @ torch.ones(2))",
    "nll": "model.nll({'input_ids': torch.zeros(2)})",
    "state": "opt.load_state_dict({})",
}


@pytest.mark.parametrize("call", FAILING)
def test_an_error_keeps_nothing_alive(call: str) -> None:
    """In a notebook, which keeps the last one. The caller's own frames, of an error it is handling, are left alone."""
    before, names = state(), dict(globals())
    names["model"], names["opt"] = made("zo", "resident")
    gone = [weakref.ref(names["model"]), weakref.ref(names["opt"])]
    try:
        exec("def mine():\n    kept = 'mine'\n    raise KeyError(kept)\nmine()", names)
    except KeyError as handled:
        with pytest.raises((UserError, RuntimeError)) as error:
            exec(FAILING[call], names)
        assert error.value.__context__ is not None
        frames = list(traceback.walk_tb(handled.__traceback__))
    del names["model"], names["opt"]
    assert [ref() for ref in gone] == [None, None] and state() == before and frames[-1][0].f_locals == {"kept": "mine"}


def test_a_module_is_not_pickled_but_copied() -> None:
    """Pickle says what to do instead, a deep copy computes the same."""
    model, _ = made("zo", "resident")
    with pytest.raises(UserError, match=r"model\.save_pretrained\(path\)"):
        pickle.dumps(model.module)
    with torch.no_grad():
        mine, theirs = (module(batch()["input_ids"]).logits for module in (model.module, copy.deepcopy(model.module)))
    assert torch.equal(mine, theirs)


def _in_a_fork() -> None:
    import os

    model, opt = made("zo", "stream")
    opt.step(batch())
    if (child := os.fork()) == 0:
        refused = []
        for call in (lambda: opt.step(batch()), opt.flush, lambda: model.nll(batch()), lambda: model.module(batch())):
            try:
                call()
            except UserError as error:
                refused.append("forked" in str(error))
        model.close()
        os._exit(0 if refused == [True] * 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    opt.step(batch())


def test_a_forked_child_is_refused() -> None:
    """A step would wait for threads that are not there. The parent goes on."""
    process = server.Process(target=_in_a_fork)
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0


def run(
    name: str, placement: str, turns: threading.Barrier | None = None, steps: int = 3, **options: Any
) -> list[torch.Tensor]:
    """Losses and weights of a model that steps and evaluates, in turn with others if there are any."""
    model, opt = made(name, placement, dtype="bfloat16" if name == "zo" else "float32", **options)
    found = []
    with model:
        for seed in range(steps):
            if turns is not None:
                turns.wait(60)
            found += [opt.step(batch(length=140, seed=seed)).cpu(), model.nll(batch(seed=seed))[0].cpu()]
        opt.flush()
        return found + [tensor.detach().cpu().clone() for _, tensor in model.named_tensors()]


def side_by_side(cases: list[tuple[str, str]], rounds: int, **options: Any) -> None:
    """Equal bits, whether models have the process for themselves, take turns in it, or run in two threads."""
    alone = [run(*case, **options) for case in cases]
    before = state()
    for _ in range(rounds):
        turns = threading.Barrier(len(cases))
        with ThreadPoolExecutor(len(cases)) as pool:
            together = list(pool.map(partial(run, turns=turns, **options), *zip(*cases, strict=True)))
        for mine, theirs in zip(alone, together, strict=True):
            assert all(map(torch.equal, mine, theirs))
        assert state() == before


def test_models_side_by_side() -> None:
    """Twenty rounds of load, step, close in two threads."""
    side_by_side([("lomo", "stream"), ("zo", "resident")], rounds=20, steps=1)


def test_dropout_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws from generators that are the process's."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 160}  # a tenth is dropped
    monkeypatch.setitem(DECODERS, "dropping", ("GPT2Config", shape))
    side_by_side([("lomo", "resident"), ("adamw", "resident")], rounds=2, decoder="dropping")


def test_a_closure_may_wait_for_a_thread_that_computes() -> None:
    """A judge of its own, say, which would otherwise wait for the end of the step."""
    (model, opt), judge = made("zo", "resident"), load()

    def loss() -> float:
        with ThreadPoolExecutor(1) as pool:
            return float(model.nll(batch())[0].sum() + pool.submit(judge.nll, batch()).result(60)[0].sum())

    assert opt.step(loss) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_models_side_by_side_on_a_gpu(case: tuple[str, str]) -> None:
    """Each within its budget; memory, limit and threads at the end as at the start."""
    device = torch.device("cuda", 0)
    options = {"device": device, "gpu_memory": "3GiB", "tf32": False}
    side_by_side([case, ("lomo", "resident")], rounds=1, **options)  # makes contexts, and workspaces of streams
    held, share = torch.cuda.memory_allocated(), torch.cuda.get_per_process_memory_fraction(device)
    holders = set(memory_limit(device).holders)  # of other tests, perhaps
    mine = torch.ones(2**20, device=device)
    side_by_side([case, ("lomo", "resident")], rounds=4, **options)
    del mine
    assert set(memory_limit(device).holders) == holders and torch.cuda.get_per_process_memory_fraction(device) == share
    assert torch.cuda.memory_allocated() <= held + 2**22
