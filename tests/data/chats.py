"""A small tokenizer with merges, and chat templates in the manner of the well-known ones.

tokenizer(CHATML)            byte-level BPE, a few hundred tokens, special tokens of all templates
answers(tokenizer, sample)   the text of each stretch of trained tokens: what a person would underline
"""

from functools import cache
from itertools import groupby
from typing import Any

from keyhole.data.dataset import Sample

CHATML = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ 'Today: ' + date_string + '\n' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Drops the reasoning of all answers but the last, and writes an empty one there when there is none.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% set said = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Closes every chat with eos unless it waits for an answer, so no prefix of a longer chat is one of its text.
CLOSING = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# No generation prompt; turns must alternate and begin with the user.
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
# The generation prompt opens a thought that finished answers do not have.
PREFILLED = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# Answers begin with a word of their own and end differently in the last turn.
CHANNELS = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{{ '<|system|>final\n' + message.content }}"
    "{{ eos_token if loop.last else '<|end|>' }}{% else %}{{ message.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Ends nothing.
BARE = (
    "{% for message in messages %}{{ message.role + ':\n' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)

# Writes calls as JSON between tags and results in a user turn; drops reasoning before the last question.
CALLING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content }}"
    "{{ '\n</tool_response><|im_end|>\n' }}{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% set thought = message.reasoning_content or '' %}"
    "{% if thought and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Joins the arguments of a call to text, and closes a turn with what the next one begins with.
JOINING = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' + call.function.arguments }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Reads ahead, and writes the results of tools into the turn of the assistant that called them.
AHEAD = (
    "{% for message in messages %}{% set here = loop.index0 %}{% if message.role != 'tool' %}"
    "{{ '<|' + message.role + '|>' }}{% for call in message.tool_calls or [] %}"
    "{{ 'call:' + call.function.name }}{{ call.function.arguments | tojson }}"
    "{% set next = messages[here + 1] %}{{ '<|system|>' + next.content + '<|end_header_id|>' }}{% endfor %}"
    "{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Says by itself what the model generates.
MARKED = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ '<|end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
CORPUS = ["What is the answer: yes or no? The capital of France is Paris. Hello there, how are you today?"] * 4


@cache
def backend(bos: bool, trim_offsets: bool = False) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(word, special=True) for word in SPECIAL]
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    steps += (
        [processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])]
        if bos
        else []
    )
    made.post_processor = processors.Sequence(steps)
    return made


def tokenizer(template: str | None = None, bos: bool = False, trim_offsets: bool = False) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend(bos, trim_offsets), bos_token="<s>", eos_token="</s>", chat_template=template
    )


def answers(tokenizer: Any, sample: Sample) -> list[str]:
    """The trained stretches of a sample, as text."""
    runs, at = [], 0
    for trained, group in groupby(label != -100 for label in sample.labels):
        n = len(list(group))
        runs += [tokenizer.decode(sample.input_ids[at : at + n], clean_up_tokenization_spaces=False)] if trained else []
        at += n
    return runs


def chat(*contents: str, first: str = "user") -> list[dict[str, str]]:
    """Turns of user and assistant by turns."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
