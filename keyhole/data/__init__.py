"""From files to batches: formats, templates and masks, packing, a resumable loader.

files, readers, columns          sources as files, and their rows
formats, turns                   rows as chats or plain text
chat_template, answers           a chat as text, and the positions of its answers
template_segments, sandbox, bill runs the program of a chat template, with limits on time and memory
render                           text as tokens, and which of them are trained on
collect, prepare                 cuts, drops, mixes and packs samples; report.py counts
dataset, loader                  samples in memory, batches in a resumable order
settings, run, cache             the data of a run
tasks/                           public tasks by name, and the user's own task files
capacity, preview                the limits of a model; samples as readable text
"""
