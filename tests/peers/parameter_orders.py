"""Writes statedict/select/parameter_orders.txt: the order of the parameters of transformers' models.
An optimizer numbers parameters in that order; a file of safetensors has them in the order of their names.

usage: parameter_orders.py ORDERS [--check]    --check: exit 1 where ORDERS holds something else

It makes every model for text on the device "meta" and asks for named_parameters. A line "for TYPE ..." begins
the orders of these model types; each other line has an element of names ("-" above the first one, and numbers
left out) and the elements below it in their order. "*": a parameter of nn.LayerNorm, which decays no weight
whatever its name is. "~": a buffer.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

# The names that Trainer takes for those of norms and biases.
UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
FOR_TEXT = ["CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "PRETRAINING"]
COLUMNS = 108


def classes_of():
    """{model type: its classes} of the types that have one for text."""
    found = defaultdict(dict)
    for name in dir(modeling_auto):
        if re.fullmatch(r"MODEL_(FOR_.*)?MAPPING_NAMES", name):
            for kind, classes in getattr(modeling_auto, name).items():
                for one in [classes] if isinstance(classes, str) else classes:
                    found[kind][one] = True
    text = set()
    for name in FOR_TEXT:
        text |= set(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES"))
    return {kind: list(found[kind]) for kind in sorted(text)}


def make(kind, name):
    """The model with the defaults of its type; None: it has none."""
    try:
        with torch.device("meta"):
            return getattr(transformers, name)(CONFIG_MAPPING[kind]())
    except Exception as error:  # whatever a model says about a config that is not for it
        print(f"{kind}: no {name}: {error}", file=sys.stderr)
        return None


def above(path):
    """The element above, of a path without its last one."""
    return next((one for one in reversed(path) if not one.isdigit()), "-")


class Orders:
    def __init__(self):
        self.pairs, self.words = defaultdict(set), defaultdict(set)
        self.norms, self.others, self.buffers, self.parameters = set(), set(), set(), set()
        self.types, self.is_plain = [], True

    def add(self, model):
        children = defaultdict(list)
        norms = {name for name, one in model.named_modules() if isinstance(one, torch.nn.LayerNorm)}
        for name, _ in model.named_parameters():
            path = name.split(".")
            for i, one in enumerate(path):
                if one not in children[tuple(path[:i])]:
                    children[tuple(path[:i])].append(one)
            place = (above(path[:-1]), path[-1])
            self.parameters.add(place)
            if not UNDECAYED.search(name):
                (self.norms if ".".join(path[:-1]) in norms else self.others).add(place)
        stored = set(model.state_dict())
        for name in (name for name, _ in model.named_buffers() if name in stored):
            path = name.split(".")
            self.buffers.add((above(path[:-1]), path[-1]))
        for path, found in children.items():
            self.add_children(above(path), found)

    def add_children(self, key, found):
        numbers = [int(one) for one in found if one.isdigit()]
        if numbers != sorted(numbers) or (numbers and len(numbers) < len(found)):
            self.is_plain = False
        words = [one for one in found if not one.isdigit()]
        self.words[key] |= set(words)
        self.pairs[key] |= set(zip(words, words[1:]))

    def joined(self, other):
        both = Orders()
        for one in (self, other):
            for key in one.words:
                both.words[key] |= one.words[key]
                both.pairs[key] |= one.pairs[key]
            for name in ("norms", "others", "buffers", "parameters"):
                getattr(both, name).update(getattr(one, name))
            both.types += one.types
            both.is_plain &= one.is_plain
        return both

    def sorted(self, key):
        """The words below the key in an order that keeps all pairs; None: there is none."""
        left, found = set(self.words[key]), []
        while left:
            free = [one for one in left if not any(b == one and a in left for a, b in self.pairs[key])]
            if not free:
                return None
            found.append(min(free))
            left.remove(found[-1])
        return found

    def is_one_order(self):
        return (self.is_plain and not self.norms & self.others and not self.buffers & self.parameters
                and all(self.sorted(key) is not None for key in self.words))

    def lines(self):
        yield from wrapped(["for", *sorted(self.types)])
        for key in sorted(set(self.words) | {key for key, _ in self.buffers}):
            words = [one + "*" * ((key, one) in self.norms) for one in self.sorted(key)]
            words += sorted(one + "~" for above, one in self.buffers if above == key)
            if len(words) > 1 or any(one[-1] in "*~" for one in words):
                yield from wrapped([key, *words])


def wrapped(words):
    """Lines of the words, those after the first one indented."""
    line = words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) > COLUMNS:
            yield line
            line = " "
        line += " " + word
    yield line


def orders():
    groups = []
    for kind, names in classes_of().items():
        own = Orders()
        own.types = [kind]
        for name in names:
            model = make(kind, name)
            if model is not None:
                own.add(model)
        if not own.words or not own.is_one_order():
            print(f"{kind}: left out", file=sys.stderr)
            continue
        for i, group in enumerate(groups):
            both = group.joined(own)
            if both.is_one_order():
                groups[i] = both
                break
        else:
            groups.append(own)
    return groups


def main():
    transformers.logging.set_verbosity_error()
    path = Path(sys.argv[1])
    head = [f"# Made by tests/peers/parameter_orders.py, which says what it is, of transformers "
            f"{transformers.__version__}."]
    text = "\n".join(head + [line for group in orders() for line in group.lines()]) + "\n"
    if "--check" in sys.argv:
        sys.exit(0 if path.read_text() == text else f"{path} is another one")
    path.write_text(text)


if __name__ == "__main__":
    main()
