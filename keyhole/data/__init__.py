"""From files to batches: formats, templates and masks, packing, a resumable loader.

files, listing                   sources as files; what is remarkable about them
opened, record                   a file, opened within bounds; one row of it, and its place
readers, columns, delimited      rows of JSON, Parquet and Arrow, CSV; count.py: roughly how many
documents                        plain text files
formats, turns, row_template     rows as chats or plain text; texts from the columns of a row
chat_template, answers           a chat as text, and the positions of its answers
template_segments, sandbox, bill runs the program of a chat template, with limits on time and memory
render                           text as tokens, and which of them are trained on
collect, prepare, report         cuts, drops, mixes and packs samples; counts what was lost on the way
overlap                          held-out samples that are training samples too
dataset, loader                  samples in memory, batches in a resumable order
padding, strata                  the width of a batch; batches with the labels of the whole data set
settings, run, cache             the data of a run
sources, first_rows              checked before anything is read
tasks/                           public tasks by name, and the user's own task files
capacity                         the limits of a model
preview, marked, token_texts     samples as readable text, and for a page; each token with its space
"""
