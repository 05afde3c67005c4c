"""Writes statedict/derive/tied_classes.txt: the tensors of transformers' models that have several names.
Files for the hub hold one of the names, and the state_dict of a model has all of them.

usage: tied_names.py TABLE [--check]    --check: exit 1 where TABLE holds something else

Lines "for CLASS ..." and "tied CLASS ..." begin the names of these classes; the latter tie also where
config.json does not say so. The lines after them have a further name and the name of its tensor. A class and
its base model say them; expressions (tensors of layers) and models within models are left out.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import transformers
from hub_names import classes, listed
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto


def names_of(model):
    """((further name, name), ...)"""
    keys = getattr(model, "_tied_weights_keys", None)
    pairs = keys.items() if isinstance(keys, dict) else ()
    plain = [tuple(re.sub(r"\\\.|[$^]", lambda found: found[0][1:], one) for one in pair)
             for pair in pairs]
    is_plain = re.compile(r"[\w.]*\.(weight|bias)").fullmatch
    return tuple(sorted(pair for pair in plain if all(map(is_plain, pair))))


def with_base(name, kind):
    """Likewise with those of the base model in it, unless the class has another one there (a decoder)."""
    model = getattr(transformers, name, None)
    if not isinstance(model, type) or not issubclass(model, transformers.PreTrainedModel):
        return ()  # its packages are not installed
    own, base = names_of(model), modeling_auto.MODEL_MAPPING_NAMES.get(kind)
    prefix = model.base_model_prefix
    if not isinstance(base, str) or base == name or not prefix:
        return own
    pairs = names_of(getattr(transformers, base, None))
    inner = [tuple(f"{prefix}.{one}" for one in pair) for pair in pairs]
    is_whole = not own or {pair[1] for pair in own} & {pair[1] for pair in inner}
    return tuple(sorted({*own, *inner})) if is_whole else own


def ties_by_default(kind):
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:  # whatever a type says that needs arguments
        return False
    return bool(getattr(config, "tie_word_embeddings", False))


def table():
    groups = defaultdict(list)
    for name, kind in classes():
        names = with_base(name, kind)
        if names:
            groups[names].append((name, ties_by_default(kind)))
    for names, found in groups.items():
        for word, is_default in (("for", False), ("tied", True)):
            if any(default == is_default for _, default in found):
                yield from listed(word, [name for name, default in found if default == is_default])
        for pair in names:
            yield " ".join(pair)


def main():
    transformers.logging.set_verbosity_error()
    path = Path(sys.argv[1])
    head = ("# Made by tests/peers/tied_names.py, which says what it is, of transformers "
            f"{transformers.__version__}.")
    text = "\n".join([head, *table()]) + "\n"
    if "--check" in sys.argv:
        sys.exit(0 if path.read_text() == text else f"{path} is another one")
    path.write_text(text)


if __name__ == "__main__":
    main()
