"""Tasks by name: a small file says how the rows of a public data set become questions with answers.

library/*.yaml                the tasks that are shipped, one file each
spec, expressions             a task file: what it may say, and its Jinja
places, tables, columns       where the rows lie, rows of tables with odd headers, columns under one name
question, build               a row as a question; labels in all their spellings
draw                          which rows train, which choose (dev), which judge (test), by seed
encode, dataset               questions in tokens, and as rows to train on
labels, classify              the same for a classifier: which label is which class, texts in tokens
run, preview                  the tasks of a run; questions for people
"""
