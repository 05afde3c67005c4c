"""Writes statedict/map/hub_names.txt: rules from the names that models of transformers have in memory to
those that save_pretrained writes, for each class of models that has others.

usage: hub_names.py TABLE [--check]    --check: exit 1 where TABLE holds something else

It makes each model on the device "meta", has transformers revert its conversions, and notes the new name of
each tensor, and the operations of those that are stacked, split or transposed. Numbers become variables where
all layers agree, and names with one beginning in common one rule. The rules are tried on all names, both
ways: a rule that has no way back gets ">". A class that needs another operation, or names that no rule
describes, is left out.
"""

import re
import sys
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, core_model_loading
from transformers.models.auto import modeling_auto

LETTERS = "abcdefghij"
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
COLUMNS = 110


class Unknown(Exception):
    """A class whose names no rule describes."""


# --- facts ------------------------------------------------------------------------------------------------


def classes():
    """[(class, model type)]"""
    found = {}
    for name in dir(modeling_auto):
        if re.fullmatch(r"MODEL_(FOR_.*)?MAPPING_NAMES", name):
            for kind, listed in getattr(modeling_auto, name).items():
                for one in [listed] if isinstance(listed, str) else listed:
                    found.setdefault(one, kind)
    return sorted(found.items(), key=lambda item: (item[1], item[0]))


def shrink(config):
    """Fewer experts."""
    for name in EXPERTS:
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > 8:
            setattr(config, name, 8)
    for one in vars(config).values():
        if isinstance(one, transformers.PreTrainedConfig):
            shrink(one)


def make(name, kind):
    """The model with the defaults of its type; None: it has none."""
    for change in (shrink, lambda config: None):
        try:
            config = CONFIG_MAPPING[kind]()
            change(config)
            with torch.device("meta"):
                return getattr(transformers, name)(config)
        except Exception as error:  # whatever a model says about a config that is not for it
            reason = error
    print(f"{name}: {type(reason).__name__}: {str(reason)[:100]}", file=sys.stderr)
    return None


def facts_of(model):
    """({name: new name}, [(names, operations, new names, patterns of the names)])"""
    state, renamed, converted = dict(model.state_dict()), {}, []
    convert, rename = core_model_loading.WeightConverter.convert, core_model_loading.apply_renamings

    def noted_convert(self, key, **more):
        sources = sorted(set().union(*self.layer_targets.values()))
        made = convert(self, key, **more)
        converted.append((sources, self.operations, list(made), list(self.source_patterns)))
        return made

    def noted_rename(key, rules):
        renamed[key] = rename(key, rules)
        return renamed[key]

    try:
        core_model_loading.WeightConverter.convert = noted_convert
        core_model_loading.apply_renamings = noted_rename
        core_model_loading.revert_weight_conversion(model, state)
    finally:
        core_model_loading.WeightConverter.convert = convert
        core_model_loading.apply_renamings = rename
    taken = {name for sources, *_ in converted for name in sources}
    plain = {name: renamed.get(name, name) for name in state if name not in taken}
    kept = []
    for sources, operations, made, patterns in converted:
        made = [renamed.get(name, name) for name in made]
        if [type(one).__name__ for one in operations] == ["Transpose"] and operations[0].check_dims:
            plain[sources[0]] = made[0]  # only where the model has another shape, which it has not
        else:
            kept.append((sources, operations, made, patterns))
    return plain, kept


# --- rules ------------------------------------------------------------------------------------------------


def pattern_of(name):
    """("layers.{a}.weight", the numbers)"""
    letters, numbers, words = iter(LETTERS), [], []
    for one in name.split("."):
        if one.isdigit():
            numbers.append(one)
            words.append("{%s}" % next(letters))
        else:
            words.append(one)
    return ".".join(words), tuple(numbers)


def fits(choice, seen):
    """Numbers of the new name that stay the same, if all seen names agree with the choice of variables."""
    fixed = {}
    for numbers, name in seen:
        for i, (which, number) in enumerate(zip(choice, (one for one in name.split(".") if one.isdigit()))):
            if number != (numbers[which] if which >= 0 else fixed.setdefault(i, number)):
                return None
    return fixed


def forms_of(seen):
    return {tuple("#" if one.isdigit() else one for one in name.split(".")) for _, name in seen}


def right_of(seen):
    """The pattern of the new names; seen: [(numbers, new name)]."""
    shapes = forms_of(seen)
    if len(shapes) != 1:
        raise Unknown(f"names of several forms: {seen[:3]}")
    shape, count = shapes.pop(), len(seen[0][0])
    for choice in product(range(-1, count), repeat=shape.count("#")):
        if sorted(one for one in choice if one >= 0) == list(range(count)):
            fixed = fits(choice, seen)
            if fixed is not None:
                parts = iter([fixed[i] if one < 0 else "{%s}" % LETTERS[one] for i, one in enumerate(choice)])
                return ".".join(next(parts) if one == "#" else one for one in shape)
    raise Unknown(f"numbers that are others: {seen[:3]}")


def with_literals(pattern, seen):
    """{pattern: new pattern}; where new names have several forms, the fewest numbers are written out. Numbers
    alone that differ may be as many as the config says: none of these is."""
    count = len(seen[0][0]) if len(forms_of(seen)) > 1 else 0
    for size in range(count + 1):
        for chosen in combinations(range(count), size):
            groups = defaultdict(list)
            for numbers, new in seen:
                groups[tuple(numbers[i] for i in chosen)].append((numbers, new))
            try:
                return dict(literal_rule(pattern, chosen, group) for group in groups.values())
            except Unknown as error:
                reason = error
    raise reason


def literal_rule(pattern, chosen, seen):
    numbers, words, letters = iter(range(len(seen[0][0]))), [], iter(LETTERS)
    for word in pattern.split("."):
        if word.startswith("{"):
            i = next(numbers)
            word = seen[0][0][i] if i in chosen else "{%s}" % next(letters)
        words.append(word)
    rest = [(tuple(one for i, one in enumerate(numbers) if i not in chosen), new) for numbers, new in seen]
    return ".".join(words), right_of(rest)


def renames_of(plain):
    """{pattern: new pattern} without "{rest:*}" """
    groups, rules = defaultdict(list), {}
    for name, new in plain.items():
        pattern, numbers = pattern_of(name)
        groups[pattern].append((numbers, new))
    for pattern, seen in groups.items():
        rules |= with_literals(pattern, seen)
    return rules


def head_of(pattern, new, depth):
    """The new beginning where the rest after `depth` elements stays; None: it does not."""
    rest, words = pattern.split(".")[depth:], new.split(".")
    return ".".join(words[:len(words) - len(rest)]) if words[len(words) - len(rest):] == rest else None


def beginnings(rules, names, depth, found):
    """Adds a rule for each beginning that all names with it share."""
    begin = ".".join(names[0].split(".")[:depth])
    is_whole = len(names) == 1 and names[0] == begin
    heads = {head_of(name, rules[name], depth) if not is_whole else rules[name] for name in names}
    head = heads.pop() if depth > 0 and len(heads) == 1 else None
    if head == begin:
        return
    if head and set(re.findall(r"\{.\}", head)) == set(re.findall(r"\{.\}", begin)):
        found.append((begin, head) if is_whole else (begin + ".{rest:*}", head + ".{rest:*}"))
        return
    if is_whole:
        raise Unknown(f"{begin} has no name")
    below = defaultdict(list)
    for name in names:
        words = name.split(".")
        if len(words) == depth:
            raise Unknown(f"{name} is a name, and the beginning of others")
        below[words[depth]].append(name)
    for group in below.values():
        beginnings(rules, group, depth + 1, found)


def steps_of(operations):
    """(the steps of the map, whether they take experts apart)"""
    kinds = [type(one).__name__ for one in operations]
    if kinds == ["SplitModulelist"]:
        return [f"unstack {operations[0].dim} {{x}}"], True
    if kinds == ["Chunk", "SplitModulelist"] and operations[1].dim == 0 and operations[0].dim > 0:
        return ["unstack 0 {x}", f"split {operations[0].dim - 1}"], True
    if kinds == ["Chunk"]:
        return [f"split {operations[0].dim}"], False
    if kinds == ["Concatenate"]:
        return [f"concat {operations[0].dim}"], False
    if kinds == ["Transpose"]:
        return [f"transpose {operations[0].dim0} {operations[0].dim1}"], False
    raise Unknown(f"operations {kinds}")


def rights_of_experts(seen):
    """The names of the experts' parts, whose last number is that of the expert."""
    parts = {}
    for sources, made, _ in seen:
        numbers = pattern_of(sources[0])[1]
        for name in made:
            words = name.split(".")
            at = max(i for i, one in enumerate(words) if one.isdigit())
            parts.setdefault(tuple(words[at + 1:]), []).append((numbers + (words[at],), name))
    expert = "{%s}" % LETTERS[len(pattern_of(seen[0][0][0])[1])]
    return [right_of(one).replace(expert, "{x}") for one in parts.values()]


def sorted_sources(lefts, patterns):
    """In the order of the operation's patterns."""
    def place(left):
        name = re.sub(r"\{.\}", "0", left)
        found = [i for i, one in enumerate(patterns) if re.search(one.replace("*.", r".*\."), name)]
        if len(found) != 1:
            raise Unknown(f"{left} matches {len(found)} patterns")
        return found[0]
    order = sorted(lefts, key=place)
    if len({place(one) for one in lefts}) != len(patterns):
        raise Unknown(f"{len(lefts)} names for {len(patterns)} patterns")
    return order


def conversions_of(kept):
    """[(names, steps, new names)]"""
    groups, rules = {}, []
    for sources, operations, made, patterns in kept:
        steps, has_experts = steps_of(operations)
        key = (tuple(pattern_of(one)[0] for one in sources), tuple(steps), has_experts)
        groups.setdefault(key, []).append((sources, made, patterns))
    for (lefts, steps, has_experts), seen in groups.items():
        numbers = [pattern_of(sources[0])[1] for sources, *_ in seen]
        if has_experts:
            rights = rights_of_experts(seen)
        else:
            rights = [right_of([(number, made[i]) for number, (_, made, _) in zip(numbers, seen)])
                      for i in range(len(seen[0][1]))]
        names = sorted_sources(lefts, seen[0][2]) if len(lefts) > 1 else list(lefts)
        rules.append((names, list(steps), rights))
    return rules


# --- the rules are tried ----------------------------------------------------------------------------------


def regex_of(pattern):
    text = re.escape(pattern).replace(r"\{rest:\*\}", "(?P<rest>.+)")
    seen = set()

    def variable(match):
        name = match.group(1)
        again = name in seen
        seen.add(name)
        return f"(?P={name})" if again else rf"(?P<{name}>\d+)"
    return re.compile(re.sub(r"\\\{(.)\\\}", variable, text))


def fill(pattern, match):
    for name, value in match.groupdict().items():
        pattern = pattern.replace("{rest:*}" if name == "rest" else "{%s}" % name, value)
    return pattern


def renamed_by(rules, name):
    for left, right in rules:
        match = regex_of(left).fullmatch(name)
        if match:
            return fill(right, match)
    return name


def has_way_back(rules, plain):
    """True when every name leads back; Unknown: a rule leads elsewhere. Rules with steps come first."""
    for name, new in plain.items():
        if renamed_by(rules, name) != new:
            raise Unknown(f"{name} became {renamed_by(rules, name)}, not {new}")
    back = [(right, left) for left, right in rules]
    return all(renamed_by(back, new) == name for name, new in plain.items())


def rules_of(model):
    """The text of the rules; "": its names are equal."""
    plain, kept = facts_of(model)
    patterns, renames = renames_of(plain), []
    beginnings(patterns, list(patterns), 0, renames)
    renames.sort(key=lambda rule: (-len(rule[1]), rule))
    sign = "=" if has_way_back(renames, plain) else ">"
    lines = []
    for lefts, steps, rights in conversions_of(kept):
        lines += [lefts[0], *(f"    + {one}" for one in lefts[1:]), *(f"    {one}" for one in steps),
                  f"    {sign} {rights[0]}", *(f"    + {one}" for one in rights[1:])]
    for left, right in renames:
        is_short = len(left) + len(right) < COLUMNS - 4
        lines += [f"{left} {sign} {right}"] if is_short else [left, f"    {sign} {right}"]
    return "\n".join(lines)


def listed(word, names):
    """Lines of names, each of which begins with the word."""
    line = word
    for name in names:
        if len(line) + 1 + len(name) > COLUMNS:
            yield line
            line = word
        line += " " + name
    yield line


def table():
    groups, same = defaultdict(list), []
    for name, kind in classes():
        model = make(name, kind)
        try:
            text = rules_of(model) if model is not None else None
        except Unknown as error:
            print(f"{name}: left out: {error}"[:200], file=sys.stderr)
            continue
        if text:
            groups[text].append(name)
        elif text is not None:
            same.append(name)
    yield from listed("same", same)
    for text, names in groups.items():
        yield from listed("for", names)
        yield text


def main():
    transformers.logging.set_verbosity_error()
    path = Path(sys.argv[1])
    head = ("# Made by tests/peers/hub_names.py, which says what it is, of transformers "
            f"{transformers.__version__}.")
    text = "\n".join([head, *table()]) + "\n"
    if "--check" in sys.argv:
        sys.exit(0 if path.read_text() == text else f"{path} is another one")
    path.write_text(text)


if __name__ == "__main__":
    main()
