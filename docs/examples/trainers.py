"""The lines that PyTorch's trainers add, one part per trainer; tests/peers/torch_trainers.py and torch_saves.py
run them in whole programs."""

import fsdp.torch
fsdp.torch.install()

import fsdp.torch

state = {"model": model_state, "optim": optim_state, "step": step}     # of get_state_dict(model, optimizer)
fsdp.torch.save(state, "run", step=step, keep_last=3)                  # run/step-00000500, on all ranks
future = fsdp.torch.async_save(state, "run", step=step, keep_last=3)   # or while the training continues
path = fsdp.torch.load(state, "run")                                   # the newest good one, at any number of ranks

import torch.distributed.checkpoint as dcp

dcp.save(state, storage_writer=fsdp.torch.Writer("checkpoint-500"))
dcp.load(state, storage_reader=fsdp.torch.Reader("checkpoint-500"))    # also DCP, safetensors, ... (every format that is read)

import fsdp.hf

saver = fsdp.hf.SaveCallback("run", background=True)
trainer = Trainer(model, args, train_dataset=rows, callbacks=[saver])
trainer.train(resume_from_checkpoint=saver.resume())

import fsdp.lightning

trainer = lightning.Trainer(plugins=[fsdp.lightning.CheckpointIO()])
