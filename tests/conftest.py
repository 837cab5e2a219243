"""Settings of the whole suite, and a tiny model with a tokenizer and data that any test can use.

The model is a random Llama of 35 thousand parameters; its tokenizer has one token a byte, a chat template,
and an end-of-turn token. Both are built once a session, offline, in the layout of a Hugging Face
directory. Tests that change a directory copy it first.
"""

import gc
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from keyhole.machine.host import cpu_has_bf16
from keyhole.weak import forget_frames
from tests.matrix import mark_the_rest
from tests.noise import draw_once

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # tests trace and generate no code: no pool of processes
gc.disable()  # until all is imported: imports make no garbage worth a walk through all that is there
# No deadline: the machine may be busy, and slow is not wrong. Runs draw other examples each time.
settings.register_profile("keyhole", deadline=None, max_examples=50)
settings.load_profile("keyhole")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def as_it_was_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test on a GPU begins without the memory of those before it, and leaves no limit of the allocator behind."""
    torch = sys.modules.get("torch")
    if request.node.get_closest_marker("gpu") is None or torch is None or not torch.cuda.is_available():
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    yield
    if torch.cuda.get_per_process_memory_fraction() != 1.0:
        gc.collect()
        torch.cuda.set_per_process_memory_fraction(1.0)


def build_tokenizer():
    """One token a byte, and the special ones above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def build_llama(vocab_size: int, **changes):
    """A random Llama, small enough for a step in milliseconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": vocab_size, "max_position_embeddings": 256}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**shape | {"initializer_range": 0.1} | changes))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with model and tokenizer. Do not change it."""
    path = tmp_path_factory.mktemp("tiny-model")
    tokenizer = build_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = build_llama(len(tokenizer), **ids)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 rows of prompt and completion, of different lengths. Do not change it."""
    path = tmp_path_factory.mktemp("tiny-data") / "sums.jsonl"
    rows = [{"prompt": f"{a} + {a * a} = ", "completion": f"{a + a * a}"} for a in range(1, 25)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs keep for the next one goes to a directory of the session, not to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYHOLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


FLUSHES = {name: getattr(os, name) for name in ("fsync", "fdatasync") if hasattr(os, name)}
OF_THE_DISK = ("tests/disk/", "tests/checkpoint/test_journal.py", "tests/training/test_full_disk.py")


@pytest.fixture(autouse=True, scope="session")
def no_wait_for_the_disk() -> Iterator[None]:
    """fsync of a regular file or a directory does nothing: thousands of calls took a tenth of the suite's time, and a
    test reads the same bytes without them. Tests about the disk itself (OF_THE_DISK) and killed processes (tests/crash)
    make the real calls."""

    def unless_a_file(real: Callable[[int], None]) -> Callable[[int], None]:
        def flush(file: Any) -> None:
            mode = os.fstat(file if isinstance(file, int) else file.fileno()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                real(file)

        return flush

    with pytest.MonkeyPatch.context() as patch:
        for name, real in FLUSHES.items():
            patch.setattr(os, name, unless_a_file(real))
        yield


@pytest.fixture(autouse=True)
def waits_for_the_disk(
    request: pytest.FixtureRequest, no_wait_for_the_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real calls, where a failing one is what a test is about."""
    if any(part in str(request.path) for part in OF_THE_DISK):
        for name, real in FLUSHES.items():
            monkeypatch.setattr(os, name, real)


@pytest.fixture(autouse=True)
def noise_drawn_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is drawn once a test, that of small tensors once a session, and so are the bits of stochastic rounding
    (tests/noise.py); tests/ops holds both to what they are."""
    if "tests/ops" not in str(request.path):
        draw_once(monkeypatch.setattr)


# Compared with what other processes have computed (ranks have them there, too), or with kernels
HAS_BF16 = cpu_has_bf16()
BY_THE_CPU = ("tests/ranks/", "tests/crash/", "tests/ops/")


@pytest.fixture(autouse=True)
def quick_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From the first model in bfloat16 to the end of the test, products by tests/bf16.py, where the CPU has none."""
    loading = sys.modules.get("keyhole.loading.prepare")
    if loading is None or HAS_BF16 or any(part in str(request.path) for part in BY_THE_CPU):
        yield
        return
    import torch

    from tests.bf16 import Products

    products, real = Products(), loading.choose_dtype

    def choose(*args: Any, **options: Any) -> Any:
        choice = real(*args, **options)
        if choice.dtype == torch.bfloat16:
            products.start()
        return choice

    monkeypatch.setattr(loading, "choose_dtype", choose)
    yield
    products.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many MiB; the test is skipped where mounting is not allowed."""
    mounted: list[Path] = []

    def mount(mib: int) -> Path:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"no mount command: {error}")
        if done.returncode:
            pytest.skip(f"mounting is not allowed: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before marks select."""
    mark_the_rest(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """A test that has failed keeps nothing: its model, with the memory, limit and threads of that, would stay for as
    long as pytest has the error, and for good if it were frozen meanwhile."""
    report = yield
    if call.excinfo is not None and not item.config.getoption("usepdb"):
        forget_frames(call.excinfo.value)
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports made is never garbage worth a walk: collections during the tests need not look at it again."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # a step makes thousands of objects and hardly a cycle


@pytest.fixture(autouse=True, scope="module")
def set_aside() -> Iterator[None]:
    """What a file leaves (modules that were imported on the way, tables that were made) is not walked again: the
    library collects where it gives memory back, and would walk all of it each time."""
    yield
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # pytest's: of a test that has failed
        vars(sys).pop(name, None)
    gc.collect()
    gc.freeze()
