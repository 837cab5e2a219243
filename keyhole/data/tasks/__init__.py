"""Tasks by name: a small file defines how the rows of a public data set become questions with answers.

library/*.yaml                the shipped tasks, one file each
spec, parse                   a task file: its keys, and what is wrong with it
expressions, pattern          its Jinja templates and regular expressions
places, tables, columns       finds the rows, reads tables with odd headers, maps columns to the task's names
question, build               turns a row into a question; labels in all their spellings
draw, cache                   draws by seed which rows are for training, for dev and for test; keeps them on disk
encode, dataset               questions as tokens, and as training rows
labels, classify              the same for a classifier: which label is which class, texts as tokens
run, preview                  the tasks of a run; questions as readable text
"""
