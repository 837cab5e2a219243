"""What a run tells people who were not there: its page, and the pages and tables that lay several runs side by side.

    entries.py    lines of run/metrics.jsonl          curves.py     the same as curves of a fixed size
    story.py      run/report.json: what was decided, planned and measured, samples, answers, how it ended
    view.py       all of a run's files, read          page.py       its page; parts.py, step_time.py: sections of it
    compared.py   several runs, side by side

The page is a function of these files alone: the run that writes it and `keyhole report` show the same. Nothing here
imports torch. A directory may be a stranger's: every file is read up to a size, and what does not fit is left out.
"""
