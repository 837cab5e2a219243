"""`keyhole demo`: every method on the embedded model and task, with a table and a page at the end.

run.py       the demo from beginning to end; one method; the same bits within a small budget
report.py    the page
"""
