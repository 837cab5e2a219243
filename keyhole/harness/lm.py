"""The model class for lm-evaluation-harness. The requests of the harness, and how they are computed:

loglikelihood           (context, continuation): all requests of a sweep at once (eval/continuations.py), so that a
                        streamed model crosses the link once per `passes` * `batch_tokens` tokens; requests that
                        differ only in their last token share a row
loglikelihood_rolling   a text in disjoint windows of max_length tokens: the windows of all texts at once
generate_until          greedy or sampled, batches by length; a streamed model crosses the link once per token of
                        a batch (eval/generate.py)
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from keyhole import assets
from keyhole.data.capacity import check_max_length, context_length
from keyhole.data.tokenizer import tokenized
from keyhole.errors import UserError
from keyhole.eval.continuations import score_continuations
from keyhole.eval.generate import continue_prompts
from keyhole.eval.rows import BATCH_TOKENS, PASSES
from keyhole.loading import load
from keyhole.machine.gpu import accelerator
from keyhole.methods.workload import Workload
from keyhole.model.model import Model

NEW_TOKENS = 256  # the harness's default for tasks without a limit
COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
DEFAULT_LENGTH = 2048
log = logging.getLogger(__name__)


class KeyholeLM(TemplateLM):
    """A model from a directory or hub id, loaded by `keyhole.load`. Arguments are those of --model_args."""

    def __init__(
        self,
        pretrained: str | Model,
        placement: str = "auto",
        gpu_memory: str | int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        wire: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        passes: int = PASSES,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        trust_remote_code: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size not in (None, 1, "1") and not str(batch_size).startswith("auto"):
            log.warning("batch_size=%s is not used: a batch holds batch_tokens=%s tokens", batch_size, batch_tokens)
        if device is not None and device.startswith("cuda") and not accelerator.is_available():
            log.warning("device=%s: there is no CUDA GPU here, the CPU is used", device)  # the harness's own default
            device = None
        if isinstance(pretrained, Model):
            self.model = pretrained
        else:
            self.model = load(
                assets.locate(pretrained, assets.MODEL),
                placement=placement,
                gpu_memory=gpu_memory,
                dtype=dtype,
                device=device,
                wire=wire,
                trust_remote_code=trust_remote_code,
                workload=Workload(method="eval", tokens=batch_tokens, passes=passes),
            )
        if self.model.classifies or self.model.tokenizer is None:
            what = "classifies texts" if self.model.classifies else "has no tokenizer"
            raise UserError(f"model: {pretrained} {what}; the harness needs a language model with its tokenizer")
        check_max_length(max_length, self.model.config, self.model.module)
        self.tokenizer, self._device = self.model.tokenizer, self.model.device
        self.max_length = max_length or context_length(self.model.config) or DEFAULT_LENGTH
        self.batch_tokens, self.passes = batch_tokens, passes
        self.add_bos_token, self._prefix = add_bos_token, prefix_token_id

    # -- tokens ----------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        known = (self._prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        first = next((i for i in known if i is not None), None)
        if first is None:
            raise UserError("model: its tokenizer has neither bos nor eos; give prefix_token_id in --model_args")
        return first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """The tokens of a text, after bos if the tokenizer adds one and the text does not begin with it."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            special = False
        how = {} if special is None else {"add_special_tokens": special}
        return list(tokenized(self.tokenizer, string, **how)["input_ids"])

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation rendered by the model's template; without add_generation_prompt the last turn is continued."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **how))

    # -- requests --------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _, before, after in requests]
        cut = sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in pairs)
        if cut:
            log.warning(
                "%s of %s requests are longer than %s tokens: cut at the left", cut, len(pairs), self.max_length
            )
        scored = score_continuations(
            self.model,
            pairs,
            self.max_length,
            batch_tokens=self.batch_tokens,
            passes=self.passes,
            watch=partial(tqdm, desc="log-likelihoods", disable=disable_tqdm or None),  # None: not without a terminal
        )
        found = list(zip(*scored, strict=True))
        for request, answer in zip(requests, found, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            cuts = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            cut = [(None, *utils.make_disjoint_window(window)) for window in cuts]
            windows, owner = windows + cut, owner + [number] * len(cut)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[number] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}  # requests with the same settings are batched together
        for number, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items(), key=str)), []).append(number)
        for numbers in alike.values():
            new, stop, settings = self._settings(requests[numbers[0]].args[1])
            room = self.max_length - new
            if room < 1:
                raise UserError(f"max_gen_toks={new}: the model has {self.max_length} positions; ask for fewer tokens")
            prompts = [self.tok_encode(requests[i].args[0])[-room:] or [self.prefix_token_id] for i in numbers]
            made = continue_prompts(
                self.model,
                prompts,
                max_new_tokens=new,
                stop=stop,
                apart=True,
                batch_tokens=self.batch_tokens,
                settings=settings,
                watch=partial(tqdm, desc="generated", disable=disable_tqdm or None),
            )
            for i, text in zip(numbers, made, strict=True):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _settings(self, asked: dict[str, Any]) -> tuple[int, list[str], dict[str, Any]]:
        """(most new tokens, stop strings, settings of Transformers' generation) for the settings of a task."""
        settings = dict(asked)
        until = settings.pop("until", None)
        stop = [until] if isinstance(until, str) else [*(until or ())]
        end = "" if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        stop = [word for word in dict.fromkeys([*stop, end]) if word]
        counts = [settings.pop(name) for name in COUNTS if settings.get(name) is not None]
        settings = {name: value for name, value in settings.items() if name not in COUNTS}
        if not settings.setdefault("do_sample", float(settings.get("temperature") or 0.0) > 0):
            settings["temperature"] = None
        return int(counts[0] if counts else NEW_TOKENS), stop, settings
