"""Loading holds no second copy of the weights."""

import resource
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from safetensors.torch import save_file

import keyhole
from tests.loading.test_load import shard
from tests.model.decoders import config
from tests.training.children import server


def _measure(path: Path, writer: Connection) -> None:
    """In a process of its own, which has imported everything and loaded nothing yet."""
    keyhole.load(config("llama"), init="random", device="cpu")  # whatever is allocated once

    def peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = peak_bytes()
    model = keyhole.load(path, device="cpu", placement="stream")
    writer.send((peak_bytes() - before, 4 * model.layout.numel, model.engine.slot_count * model.engine.slot_bytes))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 MB of random weights in five shards, matrices of 4 and 8 MB."""
    path = tmp_path_factory.mktemp("large")
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3, "vocab_size": 1000}
    made = config("llama", **shape)
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(path)
    model = keyhole.load(made, init="random", device="cpu")
    save_file(dict(model.named_tensors()), path / "model.safetensors", metadata={"format": "pt"})
    shard(path, 5)
    return path


@pytest.mark.slow
def test_peak_memory_is_the_weights_and_one_shard(large: Path) -> None:
    shard_bytes = max(file.stat().st_size for file in large.glob("*.safetensors"))
    reader, writer = server.Pipe(duplex=False)
    process = server.Process(target=_measure, args=(large, writer))
    process.start()
    writer.close()
    used, weights, slots = reader.recv()
    process.join()
    assert weights > 120e6
    assert used <= weights + slots + shard_bytes + 24e6
