"""What a model is worth: tasks scored by log-likelihood, validation loss, and a chat with it.

    tasks.py      task files: questions with candidates
    rows.py       NLL of many rows in few passes over the weights
    scoring.py    candidates into tokens, log-likelihoods into accuracies
    evaluate.py   `keyhole eval`: a table of tasks and data files
    chat.py       `keyhole chat`
"""

from typing import Any


def evaluate(*args: Any, **options: Any) -> str:
    """keyhole.eval.evaluate.evaluate, imported when it is called: the command line starts without PyTorch."""
    from keyhole.eval.evaluate import evaluate as run

    return run(*args, **options)
