"""What is written to disk and read back: Hugging Face directories, and checkpoints a run goes on from.

files.py           durable writes: beside the place, flushed, renamed
tensors.py         safetensors one tensor at a time
hf.py              a model as an ordinary Hugging Face directory
state.py           checkpoint-N/: the model, the optimizer's state, the position in the data
background.py      such a checkpoint, written behind the back of training
snapshot.py        weights of one step, written while the next steps change them; sources.py: what is written,
                   hand.py: how, copiers.py: copied aside, crc.py: summed up
journal.py         a zeroth-order run as one record a step; content.py: which weights it starts from
journal_writer.py  records appended, and flushed behind training
replay.py          from a journal back to weights
find.py            which checkpoints there are, and which are whole
origin.py          where a run goes on from: a checkpoint and the journal behind it
resume.py          which settings may change when a run goes on
"""
