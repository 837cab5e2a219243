"""The small world that the embedded model has read about: its people, towns, things and what is said of them.

Everything the demo model knows comes from these lists, and all of them are our own. What makes the world
worth learning is that words go together: a soup is fresh or stale, a room is quiet or noisy, a waiter is
kind or rude. Three kinds of structure keep it from being a bag of words:

    topic        "cold" is bad news about a soup and good news about a lemonade; a noisy room, but a noisy party
    negation     "not fresh" is bad, "not stale" is good
    contrast     "the bread was stale, but the soup was tasty": what comes after "but" decides

A topic holds its things, the adjectives that praise and blame it, and clauses that tell the same without
any adjective ("we asked for the recipe", "we left half of it"); no two topics share a thing or such a
clause. The lists are long enough that two texts are rarely the same, and short enough that a quarter of a
million weights can hold them.
"""

import random
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Topic:
    """Things of one kind, and what is said of them when they please (good) and when they do not (bad)."""

    name: str
    places: tuple[str, ...]
    things: tuple[str, ...]
    good: tuple[str, ...]
    bad: tuple[str, ...]
    good_signs: tuple[str, ...]
    bad_signs: tuple[str, ...]

    def adjectives(self, pleased: bool) -> tuple[str, ...]:
        return self.good if pleased else self.bad

    def signs(self, pleased: bool) -> tuple[str, ...]:
        return self.good_signs if pleased else self.bad_signs


def words(text: str) -> tuple[str, ...]:
    """Split at commas: the lists below stay readable as prose."""
    return tuple(word.strip() for word in text.split(","))


def pick(rng: random.Random, items: tuple[T, ...] | list[T]) -> T:
    """One item. Only rng.random() is used anywhere here: its sequence is fixed for all Python versions."""
    return items[int(rng.random() * len(items))]


def chance(rng: random.Random, probability: float) -> bool:
    return rng.random() < probability


WOMEN = words(
    "Mara, Edda, Lena, Tilda, Orla, Petra, Nina, Wanda, Greta, Sonja, Ines, Bela, Carla, Dora, Alma, Ruth, "
    "Hedy, Olga, Vera, Yrsa"
)
MEN = words(
    "Tomas, Otto, Karl, Bruno, Emil, Hugo, Jonas, Felix, Anton, Piet, Ravi, Samir, Dario, Lukas, Milo, Ned, "
    "Oskar, Paul, Rolf, Theo"
)
TOWNS = words(
    "Fernwick, Oldbridge, Saltmere, Greyport, Ashford, Millbrook, Larkhill, Stonegate, Windham, Applegarth, "
    "Duncove, Highmoor"
)
JOBS = words("baker, teacher, sailor, farmer, nurse, painter, tailor, gardener, clerk, singer, carpenter, doctor")
TOOLS = words(
    "an oven, a blackboard, a rope, a plough, a bandage, a brush, a needle, a spade, a ledger, a piano, "
    "a hammer, a lamp"
)
DAYS = words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
SEASONS = words("spring, summer, autumn, winter")
WEATHER = (
    words("it rained a little, the trees were in bloom, the birds came back, the river was high"),
    words("the sun was hot, the fields were dry, the days were long, the bees were out"),
    words("the leaves fell, the wind blew, the fog was thick, the apples were ripe"),
    words("it snowed, the lake froze, the nights were long, the roads were icy"),
)
COLOURS = words("red, blue, green, white, black, brown, yellow")

TOPICS = (
    Topic(
        "food",
        words("the Copper Kettle, the Old Oven, the Harbor Table"),
        words("soup, stew, fish pie, apple cake, bread, curry, omelet, roast, pudding, salad"),
        words("fresh, tasty, tender, rich, well spiced, warm"),
        words("stale, bland, burnt, greasy, sour, cold"),
        words("we asked for the recipe, not a crumb was left, we ordered it twice, the plates came back empty"),
        words("we left half of it, there was a hair in it, the dog would not touch it, my stomach hurt all night"),
    ),
    Topic(
        "film",
        words("the Corner Cinema, the Little Stage, the Moon Theater"),
        words("film, play, comedy, drama, puppet show, musical"),
        words("funny, moving, clever, gripping, charming"),
        words("dull, silly, confusing, clumsy, tedious"),
        words("the whole hall clapped, we laughed until we cried, nobody wanted to go home, we saw it again"),
        words("half of the hall fell asleep, people walked out, we looked at the clock, we left at the break"),
    ),
    Topic(
        "room",
        words("the River Inn, the Pine Lodge, the Station Hotel"),
        words("room, bed, cabin, attic, suite, bath"),
        words("clean, quiet, cosy, bright, tidy, soft"),
        words("dirty, noisy, damp, dusty, cramped, moldy"),
        words("we slept like stones, we stayed another night, the sheets smelled of soap, the view was lovely"),
        words("the roof leaked, a mouse ran about, the window would not close, we did not sleep at all"),
    ),
    Topic(
        "trip",
        words("the east pier, the hill station, the old tram stop"),
        words("boat trip, train ride, tour, coach ride, sleigh ride, ferry"),
        words("smooth, scenic, pleasant, safe, punctual"),
        words("bumpy, late, crowded, scary, endless"),
        words("we saw dolphins, we sang all the way, the children waved, time flew"),
        words("we all felt sick, we lost our bags, the engine broke down, we stood the whole way"),
    ),
    Topic(
        "goods",
        words("the Friday market, the corner store, the mill shop"),
        words("jacket, lamp, kettle, clock, chair, umbrella, basket, knife"),
        words("sturdy, handy, elegant, well made, useful"),
        words("flimsy, useless, ugly, overpriced, crooked"),
        words("it still works, I bought another one, my sister wants one too, I use it every day"),
        words("it broke in a week, I threw it away, I want my money back, a screw was missing"),
    ),
    Topic(
        "music",
        words("the Bell Hall, the garden stage, the jazz cellar"),
        words("concert, song, choir, band, violin, opera"),
        words("lovely, lively, graceful, stirring, sweet"),
        words("shrill, flat, tuneless, harsh, clumsy"),
        words("people sang along, I hum it still, they played it again, we bought the record"),
        words("I covered my ears, the cat hid, somebody booed, they lost the beat"),
    ),
    Topic(
        "staff",
        words("the front desk, the ticket office, the post office"),
        words("waiter, host, guide, driver, cook, porter"),
        words("kind, patient, friendly, polite, helpful, cheerful"),
        words("rude, impatient, careless, grumpy, lazy, unfriendly"),
        words("we got a smile, we left a big tip, our bags were carried up, every question was answered"),
        words("nobody said hello, we were kept waiting, we were shouted at, the bill was wrong"),
    ),
    Topic(
        "cold drink",
        words("the beach bar, the Lemon Tree, the ice house"),
        words("lemonade, ice cream, cider, iced tea"),
        words("cold, fresh, fizzy, sweet, fruity"),
        words("warm, flat, watery, sour, sticky"),
        words("we had another round, the glasses came back empty, the children cheered, we asked for more"),
        words("we had one sip, there was a fly in it, we poured it out, my tooth hurt"),
    ),
    Topic(
        "party",
        words("the town hall, the barn, the dance floor"),
        words("party, fair, festival, parade, carnival"),
        words("lively, noisy, merry, crowded, colorful"),
        words("quiet, dull, empty, stiff, gloomy"),
        words("people danced, we sang until dawn, the whole street came, we made new friends"),
        words("we left at nine, nobody danced, half of the guests fell asleep, the food ran out"),
    ),
)

VERDICTS_GOOD = words("a joy, a delight, a treat, wonderful, excellent, a success")
VERDICTS_BAD = words("a shame, a mess, a letdown, awful, terrible, a failure")
FEELS_GOOD = words("happy, glad, pleased, delighted, content")
FEELS_BAD = words("unhappy, sad, annoyed, disappointed, upset")
DEEDS_GOOD = words(
    "came back the next week, told all friends to go, thanked everybody, smiled all evening, wrote a kind letter"
)
DEEDS_BAD = words(
    "never came back, told all friends to stay away, complained to everybody, frowned all evening, "
    "wrote an angry letter"
)
ALSO_GOOD = words("would go again, would gladly pay twice, cannot wait to return, will tell my friends")
ALSO_BAD = words("would not go again, would not pay a penny, cannot wait to forget it, will warn my friends")
