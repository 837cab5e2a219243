"""Publishes models on the hub: `push_to_hub: true` at the end of a run, `keyhole push DIR ID` at any time.

card.py       README.md: base model, method, data and results
run_files.py  the files of a run that the card is made of
push.py       one commit with the model's files and its card; refusals of the hub are reported before training begins

No request is made unless a push was asked for. model/structure/source.py downloads models.
"""
