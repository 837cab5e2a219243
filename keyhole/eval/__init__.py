"""How good a model is: tasks scored by log-likelihood, validation loss, and a chat with it.

score.py          one call for every task: chosen, generated or measured
scoring.py        log-likelihoods of candidates into accuracies; metrics.py: the published numbers
classes.py        a classifier's labels into the same numbers
generate.py       answers in the model's own words
programs.py       programs that a model wrote, run in a process that may do little (jail.py)
tasks.py          files of questions with candidates; rows.py: NLL of many rows in few passes over the weights
evaluate.py       `keyhole eval`: a table of tasks and data files
conversation.py   `keyhole chat`
"""
