"""Files in, batches out: formats, templates and masks, packing, a resumable loader.

files, readers, columns          sources as files, and their rows
formats, turns                   rows as chats or plain text
chat_template                    a chat as text, and where its answers stand
template_segments, sandbox, bill the program of a chat template, and what it may spend
render                           text as tokens, and which of them are trained on
collect, prepare, packing        samples that are cut, dropped, mixed and packed; report.py counts
dataset, loader                  samples in memory, batches in a resumable order
settings, run, cache             the data of a run
tasks/                           public tasks by name, and task files of one's own
capacity, preview                what a model can take; samples for people
"""
