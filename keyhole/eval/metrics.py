"""The published metrics of tasks.

p_i is the chosen class, y_i the right one (if several are right, the chosen one, if it is among them).

    accuracy     share of p_i = y_i
    f1           of class 1: 2 TP / (2 TP + FP + FN)
    macro_f1     mean of the F1 of every class that occurs in p or y
    matthews     correlation of p and y as class indicators; for two classes
                 (TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN)); 0 if one of them is constant
    pearson      correlation of two lists of numbers; 0 if one is constant

For texts, a is the answer, and r_1, r_2, ... are the references. As in SQuAD's script both are compared in lower case,
without punctuation, articles and extra white space; the best r counts. `no answer` (SQuAD 2) is a verdict and no text:
it is right or wrong as a whole.

    exact_match  a = r
    token_f1     2 m / (words of a + words of r), m the number of common words; 0 or 1 if r is `no answer`
    exact_number the numbers are equal: 1,000 is 1000.0
"""

import math
import re
import string
import sys
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import numpy as np

from keyhole.data.tasks.spec import LOWER_IS_BETTER, extracted

MEAN = "score"  # name of the mean of different metrics
MOST_LOSS = math.log(sys.float_info.max)
NO_ANSWER = ["no", "answer"]  # the reference of a question that its passage does not answer


def accuracy(chosen: Sequence[int], right: Sequence[int]) -> float:
    return sum(p == y for p, y in zip(chosen, right, strict=True)) / len(right)


def f1(chosen: Sequence[int], right: Sequence[int], of: int = 1) -> float:
    hits = sum(p == y == of for p, y in zip(chosen, right, strict=True))
    named = sum(p == of for p in chosen) + sum(y == of for y in right)
    return 2 * hits / named if named else 0.0


def macro_f1(chosen: Sequence[int], right: Sequence[int]) -> float:
    classes = sorted({*chosen, *right})
    return sum(f1(chosen, right, of) for of in classes) / len(classes)


def matthews(chosen: Sequence[int], right: Sequence[int]) -> float:
    classes = sorted({*chosen, *right})
    p, y = (np.array([[x == k for k in classes] for x in xs], dtype=float) for xs in (chosen, right))
    return _correlation(p, y)


def pearson(found: Sequence[float], wanted: Sequence[float]) -> float:
    x, y = np.array(found, dtype=float), np.array(wanted, dtype=float)
    equal = x.min() == x.max() or y.min() == y.max()  # their mean may differ from them by its rounding
    return 0.0 if equal else _correlation(x, y)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    scale = math.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / scale) if scale else 0.0


def plain_words(text: str) -> str:
    """The text in lower case, without punctuation, articles and extra white space."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    return float(any(plain_words(answer) == plain_words(reference) for reference in references))


def token_f1(answer: str, references: Sequence[str]) -> float:
    """F1 of the words of the answer, against the best matching reference."""
    return max(_overlap(plain_words(answer).split(), plain_words(reference).split()) for reference in references)


def _overlap(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference or reference == NO_ANSWER:
        return float(answer == reference)
    return 2 * (Counter(answer) & Counter(reference)).total() / (len(answer) + len(reference))


def exact_number(answer: str, references: Sequence[str]) -> float:
    found = _number(answer)
    return float(found is not None and any(found == _number(reference) for reference in references))


def _number(text: str) -> Decimal | None:
    """Exactly: a float has 53 bits, and would take long numbers that differ in their last digits for equal."""
    try:
        number = Decimal(text.replace(",", "").replace("$", "").strip().rstrip("."))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def extract(text: str, pattern: str | None) -> str:
    """The last match of a pattern (its first group, if it has one; a match without that group does not count), or the
    text itself without a pattern."""
    return text if pattern is None else extracted(pattern, [text])[0] or ""


OF_CHOICES = {"accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews}
OF_TEXTS = {"exact_match": exact_match, "token_f1": token_f1, "exact_number": exact_number}


def as_published(name: str, value: float) -> str:
    """A metric as usually published: in percent, except losses and perplexity."""
    if name.endswith(("loss", *LOWER_IS_BETTER)):
        return f"{name} {value:.3f}"
    return f"{name} {100 * value:.1f}" + ("" if name.endswith(("matthews", "pearson", MEAN)) else " %")


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is larger than any double (null in JSON files)."""
    return math.inf if loss > MOST_LOSS else math.exp(loss)
