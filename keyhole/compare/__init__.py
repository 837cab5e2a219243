"""`keyhole compare FILE`: models x tasks x methods x grids of settings x seeds, in one process, as one table.

file.py       reads the comparison file, with the changes from the command line
plan.py       the runs of a comparison, each with a config and an id; what they share: tokenised data, hashes
execute.py    executes one run after the other; skips finished runs, records failures
result.py     a run as numbers: best step, dev, test, seconds, memory, curves; the output directory
table.py      the best settings by dev, then test: mean and spread over seeds; table.json, table.md
page.py       report.html: one self-contained page
"""
