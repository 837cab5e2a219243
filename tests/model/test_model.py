"""The facade: batches of every shape, units that come and go, and a model that is whole again afterwards."""

import random
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.workload import Workload
from keyhole.model.structure import layout as layout_module
from tests.matrix import in_every_run
from tests.model.decoders import VOCAB, batch, config, hf_nll, load
from tests.model.streaming import streamed


def padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Rows of these lengths, padded on the right."""
    one = batch(len(lengths), max(lengths))
    one["attention_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    one["input_ids"][one["attention_mask"] == 0] = 0
    one["labels"][one["attention_mask"] == 0] = -100
    return one


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_list_of_batches_is_each_batch(placement: str) -> None:
    model = load(placement=placement)
    batches = [batch(2, 10, seed=1), batch(3, 7, seed=2), batch(1, 4, seed=3)]
    alone = [model.nll(one) for one in batches]
    before = model.engine.bytes_up
    together = model.nll(batches)
    assert all(torch.equal(a, b) for x, y in zip(alone, together, strict=True) for a, b in zip(x, y, strict=True))
    weights = sum(model.layout.units[i].numel for i in model.engine.streamed) * 4
    assert model.engine.bytes_up - before <= weights


@pytest.mark.parametrize("name", ["llama", "opt", "bloom", "falcon_alibi", "gemma3"])
def test_padding_does_not_count(name: str) -> None:
    model, one = load(name), padded([9, 6, 4])
    nll_B, count_B = model.nll(one)
    assert count_B.tolist() == [6, 3, 1]
    for i, length in enumerate([9, 6, 4]):
        row = {key: one[key][i : i + 1, :length] for key in ("input_ids", "labels")}
        torch.testing.assert_close(model.nll(row)[0][0], nll_B[i], rtol=1e-5, atol=1e-5)


def test_rows_without_a_trained_token() -> None:
    model, one = load(placement="stream"), batch(3)
    one["labels"][1] = -100
    nll_B, count_B = model.nll(one)
    assert count_B.tolist() == [7, 0, 7] and nll_B[1] == 0 and nll_B[0] > 0
    one["labels"][:] = -100
    nll_B, count_B = model.nll(one)
    assert count_B.tolist() == [0, 0, 0] and nll_B.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi"])
def test_vocabulary_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(name)
    monkeypatch.setattr(layout_module, "CHUNK_ROWS", 16)
    model, one = load(name), batch(2, 12)
    assert len(model.layout.head_units) == 7
    torch.testing.assert_close(model.nll(one)[0], hf_nll(whole.module, one), rtol=1e-5, atol=1e-4)
    other = load(name, placement="stream")
    assert torch.equal(other.nll(one)[0], model.nll(one)[0])
    want = whole.generate(one["input_ids"], max_new_tokens=5, do_sample=False)
    assert torch.equal(other.generate(one["input_ids"], max_new_tokens=5, do_sample=False), want)


@pytest.mark.parametrize("keep", [(), ("table",), ("head",), ("table", "head"), ("block",)])
@pytest.mark.parametrize("slot_count", [1, 2, 5])
def test_any_mix_of_resident_and_streamed(keep: tuple[str, ...], slot_count: int) -> None:
    resident, one = load(), batch()
    other = streamed(resident, 3000, keep, slot_count=slot_count, chaos=random.Random(0))
    assert torch.equal(other.nll([one, one])[1][0], resident.nll(one)[0])


def test_generate_samples_beams_and_left_padding() -> None:
    resident, other = load(), load(placement="stream")
    ids = batch(3, 6)["input_ids"]
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = 0, 0
    for options in ({"do_sample": True, "top_k": 20}, {"num_beams": 3, "do_sample": False}):
        tokens = []
        for model in (resident, other):
            torch.manual_seed(5)
            tokens.append(model.generate(ids, mask, max_new_tokens=6, **options))
        assert torch.equal(*tokens)


def test_generate_crosses_the_link_once_a_token() -> None:
    model = streamed(load("llama"), slot_count=2)
    weights = 4 * sum(model.layout.units[i].numel for i in model.engine.streamed)
    slots = model.engine.slot_count * model.engine.slot_bytes
    model.generate(batch(4, 6)["input_ids"], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert 5 * weights <= model.engine.bytes_up <= 5 * weights + 2 * slots


@in_every_run(lambda call, max_unit_numel: call == "nll" or max_unit_numel == 1)
@pytest.mark.parametrize("max_unit_numel", [None, 1])
@pytest.mark.parametrize("at", ["model.embed_tokens", "model.layers.0", "model.layers.1.mlp.up_proj", "lm_head"])
@pytest.mark.parametrize("call", ["nll", "generate"])
def test_model_survives_a_failure(at: str, call: str, max_unit_numel: int | None) -> None:
    resident, one = load(), batch()
    model = streamed(resident, max_unit_numel, chaos=random.Random(1))

    def fail(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        raise KeyboardInterrupt

    hook = model.module.get_submodule(at).register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.nll([one, one]) if call == "nll" else model.generate(one["input_ids"], max_new_tokens=2)
    hook.remove()
    assert torch.equal(model.nll(one)[0], resident.nll(one)[0])
    want = resident.generate(one["input_ids"], max_new_tokens=2, do_sample=False)
    assert torch.equal(model.generate(one["input_ids"], max_new_tokens=2, do_sample=False), want)


def test_tokens_outside_of_the_vocabulary() -> None:
    for name in ("labels", "input_ids"):
        model, one = load(placement="stream"), batch(1, 6)
        one[name][0, 5] = VOCAB
        with pytest.raises(UserError, match=f"{name} holds . to {VOCAB}; the model has tokens 0 to {VOCAB - 1}"):
            model.nll(one)


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_parameters_are_home_between_calls(placement: str) -> None:
    model, one = load("opt", placement=placement), batch()
    padding = model.embedding.padding_idx
    for _ in range(2):
        model.nll(one)
        model.generate(one["input_ids"], max_new_tokens=2)
        assert model.embedding.padding_idx == padding is not None
        for tensor in model.layout.tensors:
            assert tensor.param.data_ptr() == model.home(tensor).data_ptr() and tensor.param.shape == tensor.shape
        torch.testing.assert_close(hf_nll(model.module, one), model.nll(one)[0])


class Recording:
    """A gate that notes which pages are waited for inside of a sweep, and refuses one of them."""

    def __init__(self, model: keyhole.Model, refused: int | None = None) -> None:
        self.engine, self.refused, self.waited = model.engine, refused, []

    def ready(self, page: int) -> bool:
        return page != self.refused

    def wait(self, page: int) -> None:
        if page == self.refused:
            raise RuntimeError("the worker failed")
        self.waited.append((page, self.engine.order == []))

    def drain(self) -> None:
        pass


@pytest.mark.parametrize("call", ["nll", "generate"])
def test_every_page_is_acquired_inside_of_the_sweep(call: str) -> None:
    """The common unit too: the sweep decides on which stream a page is waited for."""
    model = load(placement="stream")
    model.engine.gate = gate = Recording(model)
    model.engine.order = []  # until a sweep begins
    model.nll(batch()) if call == "nll" else model.generate(batch()["input_ids"], max_new_tokens=2)
    assert model.layout.common.index in {page for page, _ in gate.waited}
    assert not any(outside for _, outside in gate.waited)


def test_no_graph_is_built() -> None:
    with torch.enable_grad():
        nll_B, _ = load(placement="stream").nll(batch())
    assert not nll_B.requires_grad


def test_weights_in_8_bits_are_saved_exactly_beside_float16(tmp_path: Path) -> None:
    """Small weights have values that float16 cannot hold: what is saved and loaded again must be the same model."""
    how = {"device": "cpu", "dtype": "float16", "wire": "fp8"}
    model = keyhole.load(config("llama", initializer_range=1e-3), init="random", **how)
    model.save_pretrained(tmp_path)
    back = keyhole.load(tmp_path, **how)
    for unit in model.layout.of_kind("block"):
        here, there = (torch.empty(unit.numel) for _ in range(2))
        model.formats.decode(unit, model.engine.homes[unit.index], here)
        back.formats.decode(unit, back.engine.homes[unit.index], there)
        assert torch.equal(here, there)


@pytest.mark.gpu
@in_every_run(lambda name, seed: seed == 0 or name in ("llama", "mixtral"))
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "qwen2", "gemma3", "mixtral", "qwen3_next", "mamba"])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_equals_resident_on_a_gpu(name: str, seed: int) -> None:
    rng, one = random.Random(seed), batch(3, 12)
    options = {"device": "cuda", "dtype": rng.choice(["float32", "bfloat16"]), "init": "random"}
    resident = keyhole.load(config(name), **options)
    engine = {"chaos": random.Random(seed), "slot_count": rng.randint(1, 4), "overlap": rng.random() < 0.8}
    other = keyhole.load(config(name), placement="stream", **options, **engine)
    for _ in range(2):
        assert torch.equal(other.nll([one, batch(2, 5)])[0][0], resident.nll([one, batch(2, 5)])[0][0])
    tokens = [m.generate(one["input_ids"], max_new_tokens=6, do_sample=False) for m in (resident, other)]
    assert torch.equal(*tokens)


def test_a_budget_changes_time_not_values() -> None:
    made, work = config("llama", num_hidden_layers=6), Workload(method="eval", tokens=20, passes=1)
    nll_B = keyhole.load(made, init="random", device="cpu").nll(batch())[0]
    away = []
    for kib in (180, 250, 300, 350, 400, 450, 2000):
        options = {"placement": "auto", "gpu_memory": f"{kib}KiB", "workload": work}
        model = keyhole.load(made, init="random", device="cpu", **options)
        assert torch.equal(model.nll(batch())[0], nll_B)
        away.append(sum(model.layout.units[page].numel for page in model.engine.streamed))
    assert away == sorted(away, reverse=True) and away[-1] == 0 < away[1] and len(set(away)) > 3
    with pytest.raises(UserError, match="gpu_memory: 20KiB is below the minimum"):
        keyhole.load(made, init="random", device="cpu", placement="stream", gpu_memory="20KiB", workload=work)
