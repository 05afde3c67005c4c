"""Twenty steps of AdamW and SGD equal PyTorch's to 1e-6 relative in f32 and 1e-14 in f64.

usage: torch_optimizers.py OPTIMIZER_STEPS
"""

import itertools
import subprocess
import sys

import torch

PROGRAM = sys.argv[1]
STEPS, COUNT = 20, 1003
TYPES = {"f32": (torch.float32, 1e-6), "f64": (torch.float64, 1e-14)}


def ours(kind, name, start, gradients, numbers):
    dtype = TYPES[name][0]
    command = [PROGRAM, kind, name, str(COUNT), str(STEPS), *(repr(float(x)) for x in numbers)]
    data = b"".join(t.numpy().tobytes() for t in [start, *gradients])
    output = subprocess.run(command, input=data, check=True, capture_output=True).stdout
    return torch.frombuffer(bytearray(output), dtype=dtype).reshape(STEPS, COUNT)


def theirs(optimizer_of, start, gradients):
    param = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of([param])
    for gradient in gradients:
        param.grad = gradient.clone()
        optimizer.step()
        yield param.detach().clone()


def compare(kind, name, numbers, optimizer_of):
    dtype, tolerance = TYPES[name]
    torch.manual_seed(1)
    start = torch.randn(COUNT, dtype=dtype)
    gradients = [torch.randn(COUNT, dtype=dtype) * 10.0 ** (i % 5 - 3) for i in range(STEPS)]
    found = ours(kind, name, start, gradients, numbers)
    size = start.abs()
    for step, wanted in enumerate(theirs(optimizer_of, start, gradients)):
        # An element that comes near zero keeps the rounding of what it was: measured by the largest.
        size = torch.maximum(wanted.abs(), size)
        worst = ((found[step] - wanted).abs() / size).max().item()
        assert worst <= tolerance, f"{kind} {name} {numbers}, step {step + 1}: {worst}"


def main():
    for name, decay, maximize, beta1 in itertools.product(TYPES, (0, 0.1), (False, True), (0.9, 0.3)):
        compare(
            "adamw",
            name,
            (1e-3, beta1, 0.999, 1e-8, decay, maximize),
            lambda params: torch.optim.AdamW(
                params,
                lr=1e-3,
                betas=(beta1, 0.999),
                eps=1e-8,
                weight_decay=decay,
                maximize=maximize,
                foreach=False,
            ),
        )
    cases = [(0, 0, False), (0.9, 0, False), (0.9, 0.2, False), (0.9, 0, True)]
    for name, case, decay, maximize in itertools.product(TYPES, cases, (0, 0.01), (False, True)):
        momentum, dampening, nesterov = case
        compare(
            "sgd",
            name,
            (1e-2, momentum, dampening, decay, nesterov, maximize),
            lambda params: torch.optim.SGD(
                params,
                lr=1e-2,
                momentum=momentum,
                dampening=dampening,
                weight_decay=decay,
                nesterov=nesterov,
                maximize=maximize,
                foreach=False,
            ),
        )


main()
