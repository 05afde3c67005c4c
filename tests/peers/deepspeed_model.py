"""The model of deepspeed_to_fp32.py and deepspeed_universal.py, and the state that an engine of it has.

Tied weights, a frozen one, buffers of two types, two groups of parameters, and sizes that no number of
ranks divides, so that DeepSpeed pads.
"""

import deepspeed_ranks as ranks
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

WORDS, WIDTH, INNER, ROWS, LENGTH = 13, 5, 7, 12, 3
MOMENTS = ("exp_avg", "exp_avg_sq")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        # It has no part in the seed, because DeepSpeed does not restore it from universal checkpoints.
        nn.init.uniform_(self.fixed.weight, -0.4, 0.4, generator=torch.Generator().manual_seed(7))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 1.25, 3.0]))
        self.register_buffer("count", torch.tensor(5))

    def forward(self, words):
        inner = self.embed(words)
        inner = inner + self.fixed(self.down(torch.relu(self.norm(self.up(inner)))))
        return self.head(inner)


def groups_of(model):
    """Matrices decay, the rest does not and learns faster."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [{"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in trained if param.ndim == 1], "weight_decay": 0.0, "lr": 0.02}]


def make_engine(stage, one_group=False, seed=1, **settings):
    torch.manual_seed(seed)
    model = Model()
    groups = groups_of(model)
    params = [param for group in groups for param in group["params"]] if one_group else groups
    optimizer = torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.99))
    return ranks.engine_of(model, optimizer, stage, ROWS // dist.get_world_size(), **settings)


def train(engine, first, steps):
    """The losses of some steps, each with words of its own, which the ranks share."""
    rows, losses = ROWS // dist.get_world_size(), []
    for step in range(first, first + steps):
        words = torch.randint(WORDS, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        mine, wanted = words[:, dist.get_rank() * rows:][:, :rows]
        loss = nn.functional.cross_entropy(engine(mine).float().flatten(0, 1), wanted.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(ranks.mean_of_ranks(loss))
    return losses


def weights_of(engine):
    """In f32 and below stage 3, where the weights of the model are whole and the masters."""
    params = engine.module.named_parameters()
    return {name: param.detach().clone() for name, param in params if param.requires_grad}


def state_of(engine):
    """Masters and moments, whole, by the names that our files have."""
    found = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed does so after the step of the first group, when the others have no moments yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param)
            for moment in MOMENTS:
                found[f"optim.state.{name}.{moment}"] = safe_get_full_optimizer_state(param, moment)
    return {name: tensor.detach().clone() for name, tensor in found.items()}
