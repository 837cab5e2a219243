"""Loss, head and embedding in chunks of the vocabulary are those of the full logits."""

from dataclasses import replace

import pytest
import torch

import keyhole
from keyhole.model.backward import vocabulary as vocabulary_module
from keyhole.model.backward.vocabulary import VocabularyGradients
from keyhole.model.structure import layout as layout_module
from tests.matrix import in_every_run
from tests.model.backward.gradients import assert_same, by_autograd, collected, joined, load
from tests.model.decoders import batch, hf_nll

BATCHES = [batch(2, 10, seed=1), batch(1, 12, seed=2)]
BATCHES[1]["input_ids"][0] = torch.tensor([15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 98, 3])  # beside the ends of chunks
BATCHES[1]["labels"][0, 3:] = BATCHES[1]["input_ids"][0, 3:]


@in_every_run(lambda rows: rows != 64)
@pytest.mark.parametrize("name", ["llama", "opt", "phi"])  # phi: the head has a bias
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [16, 64, 1000])
def test_chunks_give_the_gradients_of_the_full_logits(
    name: str, tied: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of embedding and head, and each element of its bias, gets its gradient once, from its chunk."""
    monkeypatch.setattr(layout_module, "CHUNK_ROWS", rows)
    model = load(name, tie_word_embeddings=tied)
    assert model.layout.tied == tied
    assert_same(joined(collected(model, BATCHES).found), by_autograd(model, BATCHES))


@pytest.mark.parametrize("rows", [40, 1000])
def test_more_tokens_than_logits_are_made_for_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of the tokens of a pass add up, with one chunk and with several."""
    monkeypatch.setattr(layout_module, "CHUNK_ROWS", rows)
    monkeypatch.setattr(vocabulary_module, "HEAD_TOKENS", 5)
    model = load("llama", tie_word_embeddings=False)
    assert_same(joined(collected(model, BATCHES).found), by_autograd(model, BATCHES))


@pytest.mark.parametrize("name, tied, rows", [("llama", True, 40), ("phi", False, 1000)])
def test_kept_logits_give_the_same_bits(name: str, tied: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that update chunks while others wait for their gradients, reversed once and twice."""
    monkeypatch.setattr(layout_module, "CHUNK_ROWS", rows)
    found = []
    for limit in (0, 2**20):
        monkeypatch.setattr(vocabulary_module, "KEPT_BYTES", limit)
        model = load(name, tie_word_embeddings=tied)
        methods = [keyhole.LOMO(model, 1e-2), keyhole.LOMO(model, 1e-2, max_grad_norm=0.1), keyhole.AdaLOMO(model)]
        for method in methods:
            method.step(BATCHES)
        found.append([model.home(tensor).clone() for tensor in model.layout.tensors])
        vocabulary = methods[0].reverse.vocabulary
        vocabulary.hidden = [torch.zeros(1, 1)]
        assert vocabulary._keeps_logits() == (limit > 0)
    assert all(map(torch.equal, *found))


def test_few_logits_are_kept_where_all_memory_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to so many bytes in all and tokens at a time; not beside a budget, which counts them, and not of shards."""
    model = load("llama")
    vocabulary, vocabulary_bytes = VocabularyGradients(model), 4 * model.layout.table.shape[0]
    vocabulary.hidden = [torch.zeros(5, 1), torch.zeros(3, 1)]

    def keeps(kept_bytes: int = 8 * vocabulary_bytes, tokens: int = 5) -> bool:
        monkeypatch.setattr(vocabulary_module, "KEPT_BYTES", kept_bytes)
        monkeypatch.setattr(vocabulary_module, "HEAD_TOKENS", tokens)
        return vocabulary._keeps_logits()

    assert keeps() and not keeps(8 * vocabulary_bytes - 1) and not keeps(tokens=4)
    model.sharded = True
    assert not keeps()
    model.sharded, unlimited = False, model.placed
    model.placed = replace(unlimited, budget_bytes=2**30)
    assert not keeps()
    model.placed = None
    assert keeps()


def test_a_looked_up_padding_token_is_not_trained() -> None:
    """As in torch's own embedding, its row gets no gradient from being looked up; other rows do."""
    model, one = load("llama", tie_word_embeddings=False), batch(1, 8)
    assert model.embedding.padding_idx == 0
    one["input_ids"][0, :2] = 0
    table_VH = collected(model, [one]).found[model.layout.table.name]
    assert table_VH[0].abs().max() == 0 and table_VH[one["input_ids"][0, 2]].abs().max() > 0


def test_the_loss_is_the_mean_over_all_passes() -> None:
    """Over trained tokens, not over batches."""
    model = load("qwen2")
    vocabulary, sent = VocabularyGradients(model), model.to_device(BATCHES)
    with torch.no_grad(), model.sweep("test"):
        common = model.device_weights.acquire(model.layout.common)
        loss = vocabulary.loss([model.hidden(b) for b in sent], sent, common)
    total = sum(float(hf_nll(model.module, one).sum()) for one in BATCHES)
    assert float(loss) == pytest.approx(total / sum(b.token_count for b in sent), rel=1e-5)
