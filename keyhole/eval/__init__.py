"""How good a model is: tasks scored by log-likelihood, validation loss, and a chat with it.

tasks.py          task files: questions with candidates
rows.py           NLL of many rows in few passes over the weights
scoring.py        candidates into tokens, log-likelihoods into accuracies
evaluate.py       `keyhole eval`: a table of tasks and data files
conversation.py   `keyhole chat`
"""
