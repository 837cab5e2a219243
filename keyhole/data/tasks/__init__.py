"""Tasks by name: a small file defines how the rows of a public data set become questions with answers.

library/*.yaml     the shipped tasks, one file each
spec, parse        a task file: its keys and programs, and what is wrong with it; names of tasks and splits
places, tables     finds the rows; reads tables with odd headers, and maps columns to the task's names
question           turns a row into a question; the labels of a classifier
draw               draws by seed which rows are for training, for dev and for test
encode             questions as tokens, for scoring and for training
"""
