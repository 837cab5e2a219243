"""The dtype that a run computes in when it is left to us, and what is refused."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.machine.host import cpu_has_bf16
from keyhole.methods import METHODS
from keyhole.plan import dtype
from keyhole.plan.dtype import choose_dtype
from tests.model.decoders import batch, config

CPU = torch.device("cpu")
UNSAFE = [name for name, row in METHODS.items() if not row.underflow_safe]


@pytest.fixture(params=[True, False], ids=["bf16", "no bf16"])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CPU with or without bf16 arithmetic."""
    monkeypatch.setattr(dtype, "cpu_has_bf16", lambda: request.param)
    return request.param


@pytest.mark.parametrize("method", METHODS)
def test_left_to_us_it_is_one_that_the_method_and_the_cpu_can_use(method: str, has_bf16: bool) -> None:
    """float16 files stay so where losses are scaled; bf16 is not emulated; the reason names what was found."""
    half = choose_dtype("auto", SimpleNamespace(dtype=torch.float16), CPU, method)
    brain = choose_dtype("auto", SimpleNamespace(dtype=torch.bfloat16), CPU, method)
    wide = torch.bfloat16 if has_bf16 else torch.float32
    assert half.dtype == (wide if method in UNSAFE else torch.float16)
    assert (f"{method} has no loss scaling" in str(half)) == (method in UNSAFE)
    assert brain.dtype == wide and ("no arithmetic for bfloat16" in str(brain)) != has_bf16
    assert choose_dtype("auto", SimpleNamespace(dtype=torch.float32), CPU, method).dtype == torch.float32


def test_what_is_asked_for_is_taken_and_a_slow_one_is_said(has_bf16: bool) -> None:
    asked = choose_dtype("bfloat16", SimpleNamespace(dtype=torch.float32), CPU)
    assert asked.dtype == torch.bfloat16 and ("warning: this CPU has no arithmetic" in str(asked)) != has_bf16


def test_where_the_config_names_none_it_is_that_of_the_files(tiny_model: Path, tmp_path: Path) -> None:
    """As Transformers does."""
    path = tmp_path / "model"
    keyhole.load(tiny_model, device="cpu", dtype="float16").save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    names = {"dtype", "torch_dtype"}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in names}))
    model = keyhole.load(path, device="cpu")
    assert model.dtype == AutoModelForCausalLM.from_pretrained(path).dtype == torch.float16
    assert choose_dtype(None, SimpleNamespace(dtype=None)).dtype == torch.float32


def test_a_model_for_a_loop_of_ones_own_warns_where_the_dtype_is_slow(tiny_model: Path, has_bf16: bool) -> None:
    """A step of 135M parameters took 7 minutes instead of 10 seconds, and nothing said why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keyhole.load(tiny_model, device="cpu", dtype="bfloat16")
        keyhole.load(tiny_model, device="cpu", dtype="float32")
    said = [str(each.message) for each in caught if "no arithmetic for bfloat16" in str(each.message)]
    assert len(said) == (0 if has_bf16 else 1)


def test_a_run_on_float16_files_trains_in_another_dtype_and_says_so(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """OPT is published in float16: with dtype left out, adamw trained NaN after a step."""
    half = keyhole.load(tiny_model, device="cpu", dtype="float16")
    half.save_pretrained(tmp_path / "half")
    words = [f"model={tmp_path / 'half'}", f"train_data={tiny_data}", "device=cpu", "max_length=64"]
    words += ["eval_data=null", "eval_steps=null", "dtype=null", "max_steps=3", f"output_dir={tmp_path / 'out'}"]
    for dry in (["--dry-run"], []):
        assert main(["train", "demo-adamw", *words, *dry]) == 0
        said = capsys.readouterr().out
        assert "since the model's files hold float16 and adamw has no loss scaling" in said
    assert keyhole.load(tmp_path / "out", device="cpu").dtype in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("method", UNSAFE)
def test_a_method_is_not_made_on_a_dtype_that_it_cannot_train_in(method: str) -> None:
    """In a loop of one's own, too: the message names the argument of load."""
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float16")
    with pytest.raises(UserError, match=f"dtype: {method} has no loss scaling.*bfloat16"):
        METHODS[method].load()(model)


def test_a_method_that_scales_its_loss_is_made_on_float16() -> None:
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="float16")
    assert torch.isfinite(keyhole.LOMO(model).step(batch()))


CPUS = {"flags\t\t: fpu avx512_bf16 avx2": True, "flags: fpu avx512f avx2": False, "Features\t: fp asimd bf16": True}


@pytest.mark.parametrize("text", CPUS)
def test_bf16_arithmetic_is_found_in_the_flags(text: str, tmp_path: Path) -> None:
    """x86 and ARM name it differently; where nothing is known, nothing is held against the CPU."""
    assert cpu_has_bf16(tmp_path)
    (tmp_path / "cpuinfo").write_text(f"processor: 0\n{text}\n")
    assert cpu_has_bf16(tmp_path) == CPUS[text]
