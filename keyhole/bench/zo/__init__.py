"""`keyhole bench zo`: zeroth-order steps, textbook, resident and streamed, with the floor beside each.

cases.py    the rows of the tables                run.py          starts a worker process per group of cases
worker.py   times the cases of a group            model_cache.py  the model, kept for consecutive cases
floors.py   the floor of a step                   report.py       the tables
"""
