"""Publishes models on the hub: `push_to_hub: true` at the end of a run, `keyhole push DIR ID` at any time.

card.py       README.md: base model, method, data and results
push.py       one commit with the model's files and its card; refusals of the hub are reported before training begins

No request is made unless a push was asked for. model/structure/source.py downloads models.
"""
