"""Expressions of PEFT's settings match as Python's re matches them, or are refused by name.

usage: python_expressions.py PROGRAM
"""

import random
import re
import subprocess
import sys
import warnings

warnings.filterwarnings("ignore")  # of sets that a later Python may read in another way
RANDOM, TEXTS = 400, 12
NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.17.mlp.down_proj", "transformer.h.3.attn.c_attn",
         "lm_head", "model.visual.blocks.1.attn.qkv", "model.language_model.layers.2.self_attn.v_proj",
         "a\x1cb\x1f\vc", ""]
# as people write them
USUAL = [r"q_proj", r"layers\.\d+\.self_attn\.q_proj", r"model\.layers\.[02]\.mlp\.down_proj",
         r".*\.(q_proj|v_proj)", r"^(?!.*visual).*(?:q_proj|v_proj|qkv)$",
         r"(?:.*?(?:language|text).*?(?:mlp|self_attn).*?(?:k_proj|v_proj).*?)|"
         r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj)))",
         r"^(model\.language_model(?=\.).*\.(q_proj|v_proj))$", r"^model.layers.0.self_attn.q_proj",
         r"q_proj|v_proj", r"[^.]+_proj", r"\w+_(?:proj|attn)", r"(.*\.)?h\.[0-9]\.attn\.c_attn", r"",
         r"a)|(lm_head", r"?:lm_head", r".*layers\.(1[0-9]|[0-9])\..*", r"(?=.*self).*q_proj", r"lm_head\Z",
         r"lm\Bhead|lm_\bhead", r"a\sb[\s]{2}c"]
# Python takes these, and a match by states does not
REFUSED = {r"(a)\1": "refers back", r"(?P<n>a)": "named group", r"(?P<n>a)(?P=n)": "named group",
           r"(?<=a)b": "looks behind", r"(?<!a)b": "looks behind", r"(?i)a": "flags", r"(?i:a)": "flags",
           r"(?s:.)": "flags", r"(a)?(?(1)b|c)": "condition", r"(?#note)a": "comment",
           "na\u00efve": "beyond ASCII",
           r"\u00e9": "beyond ASCII", r"[a-\xff]": "beyond ASCII", r"(?=(?=a)a)a": "within a lookahead",
           r"(a{99}){99}": "4096 states", "a" * 9000: "8192 characters", "(" * 40 + ")" * 40: "32 deep",
           r"(?>a)b": "atomic", r"a++b": "possessive"}
# no expressions of Python
WRONG = {r"*a": "nothing to repeat", r"a**": "repeats a repetition", r"a{2}{3}": "repeats a repetition",
         r"a|*": "nothing to repeat", r"^*": "nothing to repeat", r"(a": "not closed",
         r"a)": "closes no group",
         r"[a": "not closed", r"[z-a]": "in order", r"[a-\d]": "in order", r"\q": "not known",
         r"[\A]": "not known", "a\\": "backslash", r"\x4": "too few digits", r"a{3,2}": "exceeds its maximum",
         r"(?:{2})": "nothing to repeat",
         r"[\8]": "not known", r"\b+": "nothing to repeat", r"(?z)": "flags"}


def random_set(draw):
    members = draw.choices(["a", "b", "c", "_", ".", "0", "7", "a-c", "0-9", r"\d", r"\w", r"\s", r"\W",
                            r"\.", r"\n", r"\x62", r"\b", "^", "$", r"\]", "("], k=draw.randint(1, 3))
    text = "".join(members)
    start = draw.choice(["[", "[", "[^"]) + draw.choice(["", "", "]"])
    return start + (text if text[0] != "^" else "b" + text) + draw.choice(["", "-"]) + "]"


def random_atom(draw, depth, looks):
    kind = draw.random()
    if kind < 0.45 or depth == 0:
        return draw.choice(["a", "b", "c", "_", r"\.", "0", "ab", "{", "}", "-", "{,", "]", r"\x61", r"\060",
                            r"\-"])
    if kind < 0.55:
        return draw.choice([".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S"])
    if kind < 0.68:
        return random_set(draw)
    if kind < 0.74:
        return draw.choice(["^", "$", r"\b", r"\B", r"\A", r"\Z"])
    inside = random_expression(draw, depth - 1, looks and kind < 0.9)
    if kind >= 0.9 and looks:
        return draw.choice(["(?=", "(?!"]) + inside + ")"
    return draw.choice(["(", "(?:"]) + inside + ")"


def random_expression(draw, depth=3, looks=True):
    alternatives = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        pieces = []
        for _ in range(draw.randint(0 if depth < 3 else 1, 4)):
            piece = random_atom(draw, depth, looks)
            if draw.random() < 0.35:
                piece += draw.choice(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{2,}", "{0}",
                                      "{1,2}?", "{,}", "{}", "{x}"])
            pieces.append(piece)
        alternatives.append("".join(pieces))
    return "|".join(alternatives)


def random_text(draw):
    return "".join(draw.choices("aaabbc_.0 7-{}\n", k=draw.randint(1, 9)))


def compiled(expression):
    try:
        return re.compile(expression)
    except (re.error, OverflowError):
        return None


def as_peft(expression):
    """The expression that PEFT makes of a key of alpha_pattern."""
    return rf"(.*\.)?({expression})$"


def ask(program, questions):
    lines = [" ".join([mode, expression.encode().hex() or "-", text.encode().hex() or "-"])
             for mode, expression, text in questions]
    ran = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    answers = ran.stdout.splitlines()
    assert len(answers) == len(questions), (len(answers), len(questions))
    return zip(questions, answers)


def compare(program, questions):
    seen = {"yes": 0, "no": 0}
    for (mode, expression, text), answer in ask(program, questions):
        pattern = compiled(expression)
        wanted = "yes" if pattern and getattr(pattern, mode)(text) else "no" if pattern else "refused"
        assert answer.split(":")[0] == wanted, (mode, expression, text, answer, wanted)
        seen[wanted] = seen.get(wanted, 0) + 1
    return seen


def main():
    program = sys.argv[1]
    for expression, words in (REFUSED | WRONG).items():
        (_, answer), = ask(program, [("match", expression, "a")])
        assert answer.startswith("refused") and words in answer, (expression, answer)
    for expression in REFUSED:
        assert compiled(expression) or "?>" in expression or "++" in expression, expression
    for expression in WRONG:
        assert not compiled(expression), expression
    for text in ("na\u00efve", "a" * 5000):
        (_, answer), = ask(program, [("match", ".*", text)])
        assert "cannot compare a name" in answer, answer
    # time and memory are bounded where a backtracking reader takes exponential time
    for expression in (r"(a*)*b", r"(a|a)*b", r"(a|aa)+$", r"(?:(?:a*)*)*b"):
        (_, answer), = ask(program, [("fullmatch", expression, "a" * 4000 + "c")])
        assert answer == "no", (expression, answer)
    (_, answer), = ask(program, [("fullmatch", "(?:" + "(?=[ab]*(?:a?){300}c)?." * 4 + ")*c", "a" * 4000)])
    assert "steps" in answer, answer
    questions = [(mode, expression, name) for expression in USUAL for name in NAMES
                 for mode, expression in (("fullmatch", expression), ("match", as_peft(expression)))]
    usual = compare(program, questions)
    draw, questions, count = random.Random(11), [], 0
    while count < RANDOM:
        expression = random_expression(draw)
        count += compiled(expression) is not None
        for _ in range(TEXTS):
            mode = draw.choice(["match", "fullmatch"])
            questions.append((mode, expression, random_text(draw)))
            questions.append(("match", as_peft(expression), random_text(draw)))
    seen = compare(program, questions)
    assert min(usual["yes"], usual["no"]) > 10 and min(seen["yes"], seen["no"]) > RANDOM, (usual, seen)
    print(f"{count} random expressions: as Python's re, {seen}")


main()
