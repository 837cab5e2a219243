"""Models out to the hub: `push_to_hub: true` at the end of a run, `keyhole push DIR ID` at any time.

card.py   README.md: what the model was made from, how, on what, with which figures
push.py   one commit with the model's files and its card; what the hub refuses is said before training begins

Nothing here is used, and no request is made, unless a push was asked for. Fetching models: model/structure/source.py.
"""
