"""`keyhole chat DIR`: chat with a model, also if it is larger than the GPU.

With a chat template, the model gets the whole conversation, written by the template. keyhole saves the template with
every model that it trains on chats, so prompts here equal those of training. Without a template, or with `--plain` (a
model that was trained on prompts as they stand), there are no turns: the model continues each text. Sampling and stop
tokens come from the model's generation_config.json. The answer is printed as it is generated. If units are streamed,
each new token moves them over the link once: W bytes of streamed weights on a link of R bytes/s give at most R / W
tokens per second.

    /reset   forget the conversation        /exit   leave (as does the end of the input)

Input may be a pipe: each line is a question, and only answers are written to the output. A line that ends with a
backslash goes on in the next one, for prompts with line breaks. Ctrl-C stops an answer; at the prompt it leaves. A
conversation that outgrows the model's context loses its oldest turns. A line that is too long by itself is refused, and
the conversation continues without it; bytes that are not UTF-8 are read as U+FFFD. If the logits are NaN, the answer
would be empty or endless, so an error is printed instead.
"""

import io
import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TextIO

import torch
from transformers import TextStreamer

from keyhole import assets
from keyhole.data.capacity import check_ids, context_length
from keyhole.data.chat_template import ChatTemplate
from keyhole.data.tokenizer import needed, tokenized
from keyhole.errors import NonFinite, UserError
from keyhole.eval.generate import Guard
from keyhole.eval.rows import not_finite
from keyhole.loading import load
from keyhole.machine.text import printable, without_controls
from keyhole.methods.workload import Workload
from keyhole.model.model import Model

MAX_NEW_TOKENS = 256
HELP = (
    "/reset forgets the conversation, /exit leaves, \\ at the end of a line goes on in the next; Ctrl-C stops an answer"
)


class Refused(UserError):
    """This line cannot be answered; the conversation continues."""


def chat(
    directory: str,
    *,
    placement: str = "auto",
    gpu_memory: str | int | None = None,
    dtype: str | None = None,
    wire: str | None = None,
    device: str | None = None,
    max_new_tokens: int | None = None,
    system: str | None = None,
    plain: bool = False,
) -> None:
    model = load(
        assets.locate(directory, assets.MODEL),
        placement=placement,
        gpu_memory=gpu_memory,
        dtype=dtype or "auto",
        wire=wire,
        device=device,
        workload=Workload(method="chat", tokens=2048, passes=1),
    )
    for line in model.describe():
        print(f"keyhole: {line}", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    talk(Conversation(model, system, max_new_tokens, plain=plain), sys.stdin, sys.stdout)


def talk(conversation: "Conversation", source: TextIO, out: TextIO) -> None:
    on_terminal = source.isatty()
    if on_terminal:
        print(HELP, file=sys.stderr)
    for number, line in _lines(source, on_terminal):
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.turns = []
        elif line.startswith("/"):
            print(f"keyhole: {printable(line.split()[0], 40)} is not a command; {HELP}", file=sys.stderr)
        elif line:
            try:
                conversation.answer(line, out)
            except (KeyboardInterrupt, UserError) as stop:
                if not (on_terminal or isinstance(stop, Refused)):
                    raise
                place = "" if on_terminal else f"line {number} is not answered: "
                told = "" if isinstance(stop, KeyboardInterrupt) else f"keyhole: {place}{printable(stop)}"
                print(told, file=sys.stderr)


def _lines(source: TextIO, on_terminal: bool) -> Iterator[tuple[int, str]]:
    """Texts without white space around them, each with the number of its first line. A line that ends with a backslash
    goes on in the next one. A terminal has line editing and a prompt."""
    held: list[str] = []
    for number in itertools.count(1):
        try:
            line = input(". " if held else "> ") + "\n" if on_terminal else source.readline()
        except EOFError:
            line = ""
        text = line.rstrip("\r\n")
        held += [text.removesuffix("\\")] if line else []
        if held and not (line and text.endswith("\\")):
            yield number - len(held) + bool(line), "\n".join(held).strip()
            held = []
        if not line:
            return


class Conversation:
    def __init__(
        self, model: Model, system: str | None = None, max_new_tokens: int | None = None, *, plain: bool = False
    ) -> None:
        self.model = model
        if model.classifies:
            raise UserError(
                f"model: {type(model.module).__name__} classifies texts and cannot write any; see keyhole eval"
            )
        self.tokenizer = needed(model.tokenizer)
        self.has_turns = bool(self.tokenizer.chat_template) and not plain
        self.template = ChatTemplate(self.tokenizer)
        del self.template.variables["date_string"]  # chat uses today's date
        if system and not self.has_turns:
            whose = "with --plain there is" if plain else "the tokenizer has"
            raise UserError(f"--system: {whose} no chat template, so there is no place for it")
        self.first = [{"role": "system", "content": system}] if system else []
        if system:
            written = system
            with suppress(UserError):  # a template that refuses it says so itself, with its reason
                written = self.template.write([*self.first, {"role": "user", "content": "Hi"}], prompt=True)
            if system.strip() not in written:
                raise UserError("--system: the model's chat template does not write it, so the model would not see it")
        self.turns: list[dict[str, str]] = []
        self.max_new_tokens: int = max_new_tokens or model.module.generation_config.max_new_tokens or MAX_NEW_TOKENS

    def answer(self, text: str, out: TextIO) -> str:
        """Writes the answer as it is generated, ends the line, and returns it. A failed answer is not kept."""
        before, self.turns = self.turns, [*self.turns, {"role": "user", "content": text}]
        try:
            answer = self._generate(self._fit(text), out)
        except BaseException:
            self.turns = before
            raise
        self.turns.append({"role": "assistant", "content": answer})
        return answer

    def _ids(self, text: str) -> torch.Tensor:
        written = self.template.write(self.first + self.turns, prompt=True) if self.has_turns else text
        how = {"add_special_tokens": False} if self.has_turns else {}
        ids: torch.Tensor = tokenized(self.tokenizer, written, return_tensors="pt", **how)["input_ids"]
        return ids

    def _fit(self, text: str) -> torch.Tensor:
        """The tokens of the conversation, without its oldest turns if the context is too short for all.
        A quarter of the context is reserved for the answer, if it may be that long."""
        ids, longest = self._ids(text), context_length(self.model.config)
        room = min(self.max_new_tokens, longest // 4) if longest else 0
        while longest and ids.shape[1] + room > longest and len(self.turns) > 2:
            self.turns = self.turns[2:]
            ids = self._ids(text)
        if longest and ids.shape[1] >= longest:
            raise Refused(f"the text has {ids.shape[1]} tokens; the model takes {longest} in all: shorten it")
        if not ids.numel():
            raise Refused("the tokenizer finds no token in the text")
        check_ids(ids[0].numpy(), "the text", self.model.source, self.model.config)
        return ids

    def _generate(self, ids: torch.Tensor, out: TextIO) -> str:
        longest, settings = context_length(self.model.config), self.model.module.generation_config
        room = min(self.max_new_tokens, longest - ids.shape[1]) if longest else self.max_new_tokens
        ends, pad = settings.eos_token_id, settings.pad_token_id
        options: dict[str, Any] = {
            "max_new_tokens": room,
            "logits_processor": [Guard()],
            "tokenizer": self.tokenizer,  # for stop_strings
            "return_dict_in_generate": False,
            "eos_token_id": self.tokenizer.eos_token_id if ends is None else ends,
            "pad_token_id": 0 if pad is None else pad,  # one row needs no padding, but Transformers requires an id
        }
        writes = settings.num_beams in (None, 1)  # beam search knows its answer only at the end
        if writes:
            options["streamer"] = _Writer(self.tokenizer, out)
        try:
            tokens = self.model.generate(ids, **options)[0, ids.shape[1] :]
        except NonFinite as stop:
            raise not_finite(self.model, str(stop)) from None
        except (ValueError, TypeError) as error:  # contradictory settings
            raise UserError(f"model: generation_config.json: generation refuses its settings: {error}") from error
        answer = self.tokenizer.decode(tokens, skip_special_tokens=True)
        print("" if writes else answer, file=out, flush=True)
        return str(answer)


class _Writer(TextStreamer):
    def __init__(self, tokenizer: Any, out: TextIO) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.out = out

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.out.write(without_controls(text) if self.out.isatty() else text)
        self.out.flush()
