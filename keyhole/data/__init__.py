"""From files and tasks to batches: one stream of rows, one collector, one cache, one preview. In the order of reading:

sources        sources as files, their rows, and what is odd about them; checked before torch is imported
examples       rows as chats or plain text; texts from the columns of a row
tokens         examples as tokens, and which of them are trained on
collect        cuts, drops, mixes and packs samples; report counts what was lost on the way
batches        batches in a resumable order, padded to a few widths

prepare, run                 from a source to a Dataset, kept for the next run; the data of a run
settings, preview            the settings of data; samples as readable text
opened, readers, arrow       a file, opened within bounds; its rows
turns                        what a turn of a chat may contain
chat_template, answers       Jinja; a chat as text, and the positions of its answers
tokenizer, dataset           what is asked of a tokenizer; samples in memory
capacity                     the limits of a model
tasks/                       public tasks by name, and the user's own task files
"""
