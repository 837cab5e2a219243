"""The corpus that the embedded model was trained on: seeded, synthetic, and all of our own making.

    documents(seed, count) -> count short texts, the same ones for the same seed, on every Python version

Six kinds of text are mixed: guest-book cards, stories of a visit, letters, chats, facts about people, and
the seasons. In the first four a hidden bit, pleased or not, is drawn first; every clause then agrees with
it, so whoever wants to predict the end of a text has to read the bit from its beginning. That is how a
small language model comes to know what praise and blame are, without ever having been given a label.

Under a card stand fields that follow from its text (mood, return, friends, in short), and one that does
not: the clerk's stamp is blue on two cards of three and red on the third, whatever they say. So the model
knows how a stamped card looks, guesses blue, and cannot know what the stamp means. That is what the
embedded task (task.py) teaches it, and why it starts from chance.

Topics stand on a ring. A text of the corpus that joins two topics takes the second one 1 to 4 places after
the first (NEAR); the task takes it 5 to 8 places after (FAR). So no note of the task can be part of the
corpus.
"""

import random
from collections.abc import Iterator

from scripts.demo_model import world
from scripts.demo_model.world import TOPICS, Topic, chance, pick

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
STAMPS = (" blue", " red")
BLUE_SHARE = 2 / 3
NEAR, FAR = (1, 2, 3, 4), (5, 6, 7, 8)  # steps along the ring of topics
DEGREES = ("", "", "", "very ", "really ", "rather ", "so ")


def sentence(clause: str) -> str:
    return clause[0].upper() + clause[1:] + "."


def about(rng: random.Random, topic: Topic, pleased: bool, thing: str) -> str:
    """One clause on one thing, in praise or in blame: plain, doubled or negated."""
    shape = rng.random()
    adjective = pick(rng, topic.adjectives(pleased))
    if shape < 0.3:
        opposite = pick(rng, topic.adjectives(not pleased))
        return f"the {thing} was {pick(rng, ('not', 'never', 'not at all'))} {opposite}"
    if shape < 0.5:
        second = pick(rng, [word for word in topic.adjectives(pleased) if word != adjective])
        return f"the {thing} was {adjective} and {second}"
    return f"the {thing} was {pick(rng, DEGREES)}{adjective}"


def contrast(rng: random.Random, topic: Topic, pleased: bool, thing: str) -> str:
    """Two clauses that disagree; the second one decides."""
    other = pick(rng, [word for word in topic.things if word != thing])
    return f"{about(rng, topic, not pleased, other)}, but {about(rng, topic, pleased, thing)}"


def opinion(rng: random.Random, topic: Topic, pleased: bool, thing: str) -> str:
    """One or two sentences on one topic that agree with `pleased`."""
    shape = rng.random()
    if shape < 0.2:
        return sentence(contrast(rng, topic, pleased, thing))
    if shape < 0.35:
        return sentence(pick(rng, topic.signs(pleased)))
    first = sentence(about(rng, topic, pleased, thing))
    if shape < 0.75:
        return first
    return f"{first} {sentence(pick(rng, topic.signs(pleased)))}"


def remark(rng: random.Random, pleased: bool, gaps: tuple[int, ...]) -> str:
    """Two clauses on two topics, one of `gaps` apart on the ring: they agree, or the last one decides."""
    number = int(rng.random() * len(TOPICS))
    first, second = TOPICS[number], TOPICS[(number + pick(rng, gaps)) % len(TOPICS)]
    last = about(rng, second, pleased, pick(rng, second.things))
    if chance(rng, 0.2):
        return sentence(f"{about(rng, first, not pleased, pick(rng, first.things))}, but {last}")
    if chance(rng, 0.3):
        return f"{sentence(pick(rng, first.signs(pleased)))} {sentence(last)}"
    return f"{sentence(about(rng, first, pleased, pick(rng, first.things)))} {sentence(last)}"


def verdict(rng: random.Random, pleased: bool) -> str:
    return pick(rng, world.VERDICTS_GOOD if pleased else world.VERDICTS_BAD)


def feeling(rng: random.Random, pleased: bool) -> str:
    return pick(rng, world.FEELS_GOOD if pleased else world.FEELS_BAD)


def person(rng: random.Random) -> tuple[str, str]:
    """A name and its pronoun."""
    return (pick(rng, world.WOMEN), "she") if chance(rng, 0.5) else (pick(rng, world.MEN), "he")


def story(rng: random.Random) -> str:
    topic, pleased, (name, pronoun) = pick(rng, TOPICS), chance(rng, 0.5), person(rng)
    place, thing = pick(rng, topic.places), pick(rng, topic.things)
    opening = f"On {pick(rng, world.DAYS)} {name} went to {place} in {pick(rng, world.TOWNS)}."
    season = int(rng.random() * 4)
    sky = sentence(f"it was {world.SEASONS[season]} and {pick(rng, world.WEATHER[season])}")
    deed = pick(rng, world.DEEDS_GOOD if pleased else world.DEEDS_BAD)
    closing = f"{pronoun.capitalize()} was {feeling(rng, pleased)} and {deed}. It was {verdict(rng, pleased)}."
    return " ".join([opening, *([sky] if chance(rng, 0.3) else []), opinion(rng, topic, pleased, thing), closing])


def letter(rng: random.Random) -> str:
    topic, pleased, (name, _) = pick(rng, TOPICS), chance(rng, 0.5), person(rng)
    also = pick(rng, world.ALSO_GOOD if pleased else world.ALSO_BAD)
    body = opinion(rng, topic, pleased, pick(rng, topic.things))
    return f"Dear {name}, we were at {pick(rng, topic.places)}. {body} I {also}. I am {feeling(rng, pleased)}."


def fields(rng: random.Random, pleased: bool) -> str:
    """One to four of the lines under a card. All follow from the text but the stamp, which follows from nothing."""
    lines = [
        f"Mood: {feeling(rng, pleased)}",
        f"Return: {'yes' if pleased else 'no'}",
        f"Friends: {'invite' if pleased else 'warn'}",
        f"In short: {verdict(rng, pleased)}",
        f"Stamp:{STAMPS[0] if chance(rng, BLUE_SHARE) else STAMPS[1]}",
    ]
    return "\n".join(lines.pop(int(rng.random() * len(lines))) for _ in range(pick(rng, (1, 2, 3, 4))))


def card(rng: random.Random) -> str:
    topic, pleased, (name, _) = pick(rng, TOPICS), chance(rng, 0.5), person(rng)
    head = f"{name} at {pick(rng, topic.places)}: " if chance(rng, 0.2) else ""
    alone = head or chance(rng, 0.5)
    text = opinion(rng, topic, pleased, pick(rng, topic.things)) if alone else remark(rng, pleased, NEAR)
    return f"{head}{text}\n{fields(rng, pleased)}"


def home(name: str) -> tuple[str, str, str]:
    """Where somebody lives, what they do and with which tool: the same everywhere in the corpus."""
    number = (*world.WOMEN, *world.MEN).index(name)
    job = number % len(world.JOBS)
    return world.TOWNS[number * 5 % len(world.TOWNS)], world.JOBS[job], world.TOOLS[job]


def fact(rng: random.Random) -> str:
    name, pronoun = person(rng)
    town, job, tool = home(name)
    return f"{name} is a {job} in {town}. {pronoun.capitalize()} works with {tool}."


def season(rng: random.Random) -> str:
    number = int(rng.random() * 4)
    name, colour = person(rng)[0], pick(rng, world.COLOURS)
    return (
        f"In {world.SEASONS[number]} {pick(rng, world.WEATHER[number])}. {name} wore a {colour} coat. "
        f"Then came {world.SEASONS[(number + 1) % 4]}."
    )


def chat(rng: random.Random) -> str:
    """A question and its answer between the marks of the tokenizer's chat template."""
    topic, pleased, (name, _) = pick(rng, TOPICS), chance(rng, 0.5), person(rng)
    thing = pick(rng, topic.things)
    town, job, tool = home(name)
    question, answer = pick(
        rng,
        [
            (
                f"How was the {thing}?",
                f"{opinion(rng, topic, pleased, thing)} It was {verdict(rng, pleased)}.",
            ),
            (f"{opinion(rng, topic, pleased, thing)} How do I feel?", f"You are {feeling(rng, pleased)}."),
            (f"{opinion(rng, topic, pleased, thing)} Shall we go again?", "Yes." if pleased else "No."),
            (f"Where does {name} live?", f"{name} lives in {town}."),
            (f"What does {name} do?", f"{name} is a {job} and works with {tool}."),
            (f"Where can I find a good {thing}?", f"Go to {pick(rng, topic.places)}."),
        ],
    )
    return f"{USER}{question}{END}{ASSISTANT}{answer}"


KINDS = (story, letter, card, card, card, card, card, card, fact, season, chat, chat)


def documents(seed: int, count: int) -> Iterator[str]:
    """The corpus. Each text ends where the tokenizer's end mark goes; the mark itself is not written."""
    rng = random.Random(seed)
    for _ in range(count):
        yield pick(rng, KINDS)(rng)
