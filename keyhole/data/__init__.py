"""From files and tasks to batches: one stream of rows, one collector, one cache, one preview.

settings                         the settings of data
files                            sources as files, and what is odd about them; every row of them
opened, readers                  a file, opened within bounds; its rows (JSON, CSV, plain text)
parquet, delimited               rows of Parquet; cells of CSV and TSV
formats, turns, row_template     rows as chats or plain text; texts from the columns of a row
sources                          checked before anything is read
worker, sandbox                  a process with a limit of time and memory; Jinja in it
chat_template, answers           a chat as text, and the positions of its answers
tokens, render                   what is asked of a tokenizer; text as tokens, and which of them are trained on
collect, prepare, report         cuts, drops, mixes and packs samples; counts what was lost on the way
cache                            what was made of files, kept for the next run
dataset, batches                 samples in memory; batches in a resumable order, padded to a few widths
capacity                         the limits of a model
run                              the data of a run
preview                          samples as readable text, and for a page
tasks/                           public tasks by name, and the user's own task files
"""
