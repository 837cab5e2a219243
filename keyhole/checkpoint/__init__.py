"""What is written to disk and read back: Hugging Face directories, and checkpoints a run goes on from.

files.py     durable writes: beside the place, flushed, renamed
tensors.py   safetensors one tensor at a time
hf.py        a model as an ordinary Hugging Face directory
state.py     checkpoint-N/: the model, the optimizer's state, the position in the data
find.py      which checkpoints there are, and which are whole
resume.py    which settings may change when a run goes on
"""
