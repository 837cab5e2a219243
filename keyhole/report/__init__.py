"""Reports about runs: the page of a run, and pages and tables that compare several runs.

    entries.py    lines of run/metrics.jsonl          curves.py     the same as curves of a fixed size
    story.py      run/report.json (decisions, planned and measured numbers, samples, answers, how the run ended), and
                  all files of a run together
    page.py       a run's page; its sections are in parts.py
    compared.py   several runs side by side

The page depends only on these files, so the run itself and `keyhole report` produce the same page. Nothing here imports
torch. A directory may be untrusted: files are read up to a size limit, and invalid values are left out.
"""
