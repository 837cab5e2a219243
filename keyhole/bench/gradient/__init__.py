"""`keyhole bench lomo | lsp`: first-order methods beside torch's own optimizers.

trials.py   the rows of the tables                run.py      starts a worker process per shape
worker.py   times trials                          native.py   the baseline: torch's optimizer on the plain module
parts.py    where the time of a step went         traced.py   torch.compile without code generation
report.py   the tables                            own_products.py   the products of a step, timed by themselves
"""
