"""Evaluation of a model: tasks scored by log-likelihood or generated answers, validation loss, and chat.

score.py          one call for every kind of task: candidates, labels of a classifier, generation or likelihood
metrics.py        the published metrics
generate.py       greedy answers in free text; continuations.py: log-likelihoods for evaluation suites
programs.py       runs programs that a model wrote, in a restricted process (confined.py)
rows.py           NLL of many rows in few passes over the weights
evaluate.py       `keyhole eval`: a table of tasks and data files; asked.py: their names, checked without torch
conversation.py   `keyhole chat`
"""
