"""Resumes a run of DeepSpeed in FSDP2, which fsdp-convert wrote as DCP.

    fsdp-convert RUN for-fsdp2 --to dcp

The model has the names that it had in DeepSpeed, and the optimizer is of the same class.
"""

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def load(model, optim, path):
    state = get_model_state_dict(model)
    state["optim"] = get_optimizer_state_dict(model, optim)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optim, state.pop("optim"))
    set_model_state_dict(model, state)
