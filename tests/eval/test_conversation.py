"""Chat: pipes in and out, conversations through the template, settings of the generation config, interrupts."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.eval import conversation as chat_module
from keyhole.eval.conversation import Conversation, talk
from tests.training.children import command


def load(directory: Path, **options: str) -> keyhole.Model:
    return keyhole.load(directory, device="cpu", **options)


def copy(directory: Path, to: Path, **generation: object) -> Path:
    """A directory with its own generation config."""
    shutil.copytree(directory, to)
    settings = {"eos_token_id": 257, "pad_token_id": 256, **generation}
    (to / "generation_config.json").write_text(json.dumps(settings))
    return to


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_the_answer_is_what_generate_gives(tiny_model: Path, placement: str) -> None:
    """Streamed text, returned text and HF's own greedy tokens for the template's prompt are the same."""
    model, out = load(tiny_model, placement=placement), io.StringIO()
    answer = Conversation(model, max_new_tokens=12).answer("How was it?", out)
    prompt = model.tokenizer("<|user|>How was it?<|end|><|assistant|>", return_tensors="pt").input_ids
    tokens = load(tiny_model).generate(prompt, max_new_tokens=12)[0, prompt.shape[1] :]
    assert answer == model.tokenizer.decode(tokens, skip_special_tokens=True)
    assert out.getvalue() == answer + "\n"


def test_a_system_prompt_that_the_template_drops_is_refused(tiny_model: Path) -> None:
    model = load(tiny_model)
    own = model.tokenizer.chat_template
    model.tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="--system: the model's chat template does not write it"):
        Conversation(model, system="Be kind.")
    Conversation(model)
    model.tokenizer.chat_template = own


def prompts(conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model will be asked; its answers are `answer 1` and so on."""
    seen = []

    def generate(ids: torch.Tensor, out: io.StringIO) -> str:
        seen.append(conversation.tokenizer.decode(ids[0]))
        return f"answer {len(seen)}"

    monkeypatch.setattr(conversation, "_generate", generate)
    return seen


def test_the_conversation_goes_on_until_reset(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is asked with all that was said before it; /reset forgets, the system prompt stays."""
    conversation = Conversation(load(tiny_model), system="Be kind.")
    seen = prompts(conversation, monkeypatch)
    talk(conversation, io.StringIO("one\ntwo\n\n/reset\nthree\n/exit\nfour\n"), io.StringIO())
    system = "<|system|>Be kind.<|end|>"
    assert seen == [
        f"{system}<|user|>one<|end|><|assistant|>",
        f"{system}<|user|>one<|end|><|assistant|>answer 1<|end|><|user|>two<|end|><|assistant|>",
        f"{system}<|user|>three<|end|><|assistant|>",
    ]


def test_a_backslash_and_plain_give_the_prompt_of_training(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts with line breaks can be asked, and without the template that they were trained without."""
    conversation = Conversation(load(tiny_model), plain=True)
    seen = prompts(conversation, monkeypatch)
    too_long = f"start\\\n{'x' * 5000}\n"
    talk(conversation, io.StringIO(f"Review: a\\\r\nVerdict:\r\n{too_long}/reset\none\\"), io.StringIO())
    assert seen == ["Review: a\nVerdict:", "one"]
    assert "line 3 is not answered" in capsys.readouterr().err  # its first line
    with pytest.raises(UserError, match="with --plain there is no chat template"):
        Conversation(conversation.model, system="Be kind.", plain=True)


def test_without_a_template_the_model_goes_on_from_the_line(tiny_model: Path) -> None:
    """A base model continues each line by itself; a system prompt would have no place."""
    model = load(tiny_model)
    model.tokenizer.chat_template = None
    conversation, out = Conversation(model, max_new_tokens=5), io.StringIO()
    answers = [conversation.answer("The soup", out) for _ in range(2)]
    assert answers[0] == answers[1]
    with pytest.raises(UserError, match="no chat template"):
        Conversation(model, system="Be kind.")


def test_the_generation_config_is_honoured(tiny_model: Path, tmp_path: Path) -> None:
    """Length, sampling, stop tokens, stop strings and beams come from generation_config.json."""
    plain = load(tiny_model)
    prompt = plain.tokenizer("<|user|>Hi<|end|><|assistant|>", return_tensors="pt").input_ids
    first = plain.generate(prompt, max_new_tokens=3)[0, prompt.shape[1] :].tolist()
    short = Conversation(load(copy(tiny_model, tmp_path / "short", max_new_tokens=2)))
    assert short.max_new_tokens == 2
    assert short.answer("Hi", io.StringIO()) == plain.tokenizer.decode(first[:2])
    stops = Conversation(load(copy(tiny_model, tmp_path / "stops", eos_token_id=[257, first[0]])))
    assert len(stops.model.tokenizer(stops.answer("Hi", io.StringIO())).input_ids) <= 1
    word = plain.tokenizer.decode(first[:1])
    words = copy(tiny_model, tmp_path / "words", stop_strings=[word], return_dict_in_generate=True)
    assert Conversation(load(words)).answer("Hi", io.StringIO()) == word
    beams, out = Conversation(load(copy(tiny_model, tmp_path / "beams", num_beams=3)), max_new_tokens=4), io.StringIO()
    assert beams.answer("Hi", out) + "\n" == out.getvalue()


def test_old_turns_make_room(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation longer than the context loses its oldest turns; one text that is too long is refused."""
    conversation = Conversation(load(tiny_model), max_new_tokens=20)
    monkeypatch.setattr(conversation, "_generate", lambda ids, out: lengths.append(ids.shape[1]) or "x" * 20)
    lengths: list[int] = []
    for _ in range(12):
        conversation.answer("y" * 20, io.StringIO())
    assert max(lengths) + 20 <= 256 and len(conversation.turns) < 24
    assert lengths[-1] > 256 - 20 - 50  # and no more than needed
    with pytest.raises(UserError, match="the model takes 256"):
        conversation.answer("z" * 300, io.StringIO())
    assert conversation.turns[-1]["role"] == "assistant"  # what failed left no trace


class Terminal(io.StringIO):
    """Input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_interrupts_and_errors_on_a_terminal(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Ctrl-C stops an answer and an error is told; both return to the prompt. From a pipe they end the command."""
    conversation = Conversation(load(tiny_model))
    faults = [KeyboardInterrupt(), UserError("too long"), None]

    def generate(ids: torch.Tensor, out: io.StringIO) -> str:
        fault = faults.pop(0)
        if fault is not None:
            raise fault
        return "fine"

    monkeypatch.setattr(conversation, "_generate", generate)
    words = iter(["one", "two", "/nonsense", "three", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(words))
    talk(conversation, Terminal(), io.StringIO())
    assert [turn["content"] for turn in conversation.turns] == ["three", "fine"]
    errors = capsys.readouterr().err
    assert "too long" in errors and "/nonsense is not a command" in errors and "/reset" in errors
    faults[:] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        talk(conversation, io.StringIO("four\n"), io.StringIO())


def test_the_command_works_with_pipes(tiny_model: Path) -> None:
    """Lines in, answers out, nothing else on standard output; the end of the input is the end."""
    words = ["chat", str(tiny_model), "--max-new-tokens", "4", "placement=stream"]
    code, printed, said = command(words, b"Hi\nHi again\n")
    assert code == 0, said.decode()
    model, out = load(tiny_model), io.StringIO()
    talk(Conversation(model, max_new_tokens=4), io.StringIO("Hi\nHi again\n"), out)
    assert printed.decode() == out.getvalue()


def test_a_line_that_is_too_long_does_not_end_the_conversation(tiny_model: Path, capsys) -> None:
    """From a pipe, too, it is refused by number, and the answers to the others are those without it."""
    outputs = []
    for lines in ("Hi\n" + "z" * 300 + "\nAgain\n", "Hi\nAgain\n"):
        out = io.StringIO()
        talk(Conversation(load(tiny_model), max_new_tokens=4), io.StringIO(lines), out)
        outputs.append(out.getvalue())
    assert outputs[0] == outputs[1]
    assert "line 2 is not answered: the text has 3" in capsys.readouterr().err


def test_bytes_that_are_not_text_do_not_end_the_conversation(tiny_model: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nHi\n"), encoding="utf-8"))
    chat_module.chat(str(tiny_model), device="cpu", max_new_tokens=4)
    found = capsys.readouterr().out
    out = io.StringIO()
    talk(Conversation(load(tiny_model), max_new_tokens=4), io.StringIO("caf\ufffd\nHi\n"), out)
    assert found == out.getvalue()


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sampled", "beams"])
def test_a_damaged_model_says_so(tiny_model: Path, tmp_path: Path, placement: str, settings: dict) -> None:
    """NaN in the weights is no answer: the tensor is named, and the command ends."""
    model = load(copy(tiny_model, tmp_path / "model", **settings), placement=placement)
    tensor = model.layout.tensors[3]
    model.home(tensor).fill_(float("nan"))
    with pytest.raises(UserError, match=f"no answer: the model's logits are NaN.* {tensor.name} has NaN"):
        talk(Conversation(model), io.StringIO("Hi\n"), io.StringIO())


def test_a_token_without_a_row_is_refused(tiny_model: Path) -> None:
    """A tokenizer that has outgrown the embedding is told apart from an index out of range."""
    model = load(tiny_model)
    model.tokenizer.add_tokens(["soup"])
    with pytest.raises(UserError, match="the text has token id 261, .* 261 rows"):
        Conversation(model).answer("The soup", io.StringIO())


def test_a_model_without_a_tokenizer_cannot_talk(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    with pytest.raises(UserError, match="tokenizer files"):
        chat_module.chat(str(tmp_path), device="cpu")
