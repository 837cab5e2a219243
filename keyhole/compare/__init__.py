"""`keyhole compare FILE`: models x tasks x methods x grids of settings x seeds, in one process, as one table.

file.py       the comparison file, and what the command line changes of it
names.py      names of models, tasks and methods: printable, distinct; settings that have their own place
plan.py       the runs that follow from it, each with a config and an id
kept.py       what runs of one process share: open weight files, tokenised data, hashes
execute.py    one run after the other; what was done before is recognised, what fails is recorded
result.py     a run as numbers: chosen step, dev, test, seconds, memory, curves
table.py      the best settings by dev, then test: mean and spread over seeds; table.json, table.md
page.py       report.html: one page without anything from outside
chart.py      its charts, as SVG
"""
