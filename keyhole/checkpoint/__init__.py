"""What is written to disk and read back: Hugging Face directories, and checkpoints a run goes on from.

disk/files.py           durable writes: beside the place, flushed, renamed
disk/tensors.py         safetensors one tensor at a time
model/weights/save.py              a model as an ordinary Hugging Face directory
state.py           checkpoint-N/: the model, the optimizer's state, the position in the data
checkpoint/snapshot/background.py      such a checkpoint, written behind the back of training
checkpoint/snapshot/snapshot.py        weights of one step, written while the next steps change them; checkpoint/snapshot/source.py: what is written,
                   checkpoint/snapshot/page_writer.py: how, checkpoint/snapshot/copy_threads.py: copied aside, disk/crc.py: summed up
checkpoint/journal/format.py         a zeroth-order run as one record a step; disk/weights_hash.py: which weights it starts from
checkpoint/journal/writer.py  records appended, and flushed behind training
checkpoint/journal/replay.py          from a journal back to weights
select.py            which checkpoints there are, and which are whole
checkpoint/journal/resume_point.py          where a run goes on from: a checkpoint and the journal behind it
training/resume.py          which settings may change when a run goes on
"""
