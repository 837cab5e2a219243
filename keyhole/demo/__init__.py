"""`keyhole demo`: every method on the embedded model and task, with a table and a page at the end.

run.py          the demo from beginning to end     train.py       one method: set-up, training, result
peak_memory.py  the memory of each method          budget.py      the same bits within a budget below the model's size
report.py       the page
"""
