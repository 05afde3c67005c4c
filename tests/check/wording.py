"""Counts sentences of comments that have no verb, and words that docs/style.md replaces by the usual ones, in
comments, strings and pages. No count may exceed its limit here, which is the count that was reached: a change
that lowers one lowers the limit. Questions and titles of sections are not counted.

usage: wording.py REPOSITORY [--list WORD]
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
FOLDERS = ["base", "kernels", "formats", "statedict", "runtime", "tools", "docs", "tests"]
ENDINGS = (".c", ".h", ".cu", ".cuh", ".py", ".sh", ".md", ".scd", "CMakeLists.txt")
OTHERS = ("tests/golden/", "tests/fuzz/corpus/", "tests/cli/cases/", "tests/check/wording.py",
          "docs/style.md")
NO_VERB = "sentences without a verb"
WORDS = {  # the word: its pattern, and how often it may occur
    "is no X": (r"(?<!there )\b(?:is|are|was|were) no(?: |ne of )(?!longer|more)", 50),
    "behind": (r"\bbehind\b", 43),
    "beside": (r"\bbeside\b", 97),
    "go on": (r"\b(?:go|goes|going|went|gone) on\b", 13),
    "turned": (r"\bturned\b(?! (?:on|off|into|out))", 10),
    "room (capacity)": (
        r"\b(?:ha[sd]|have|more|enough|makes?|leaves?|with|little) room\b|\b[Rr]oom for\b", 7),
    "mathematics": (r"\bmathematics\b", 2),
    "all the same": (r"\ball the same\b", 0),
    "anew": (r"\banew\b", 12),
    NO_VERB: (None, 382),
}
CODE = re.compile(r"/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.S)
BREAK = re.compile(r"\"\s*\n\s*\"|\n[ \t]*(?:[*#](?!/))?[ \t]*")
SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")
# Finite forms: auxiliaries, irregular pasts, and what the comments of this tree do. A noun among them hides
# a sentence without a verb; none is found wrongly for it.
AUXILIARY = """is are was were be been has have had do does did can cannot could may might must shall should
will would needs need isn doesn don aren let lets gave took came went made began held kept
left met sent wrote found got lost read ran said saw stood fell grew knew meant paid put set
cut hit"""
VERBS = """abort accept accumulate act add adapt admit advance agree aim allocate allow announce answer
appear append apply arrive ask assert avoid become beat begin behave belong bind borrow break
bring build bypass call carry cast catch cause change check choose claim clear climb clip close
collect combine come compare compile complete compose compress compute concern confine connect
consist consume contain continue contradict convert copy cost count cover create cross cut damage
deal decide declare decode define delay delete demand depend derive describe destroy detect
differ disagree disappear distinguish divide draw drive duplicate drop emit empty enable encode
end ensure enter equal escape evaluate exceed exchange exclude execute exist exit expect extend
fail fall feed fetch fill find finish fit fix flip flush fold follow forbid force fork forward
free freeze fsync gain gather generate get give go grow guess hand handle happen hash help hide
hold honour identify ignore imply include increment inherit insert invalidate invent issue join
jump keep kill know lack last launch lay lead learn leave lend lie like list listen live load
lock look lose lower make map mark match matter mean measure meet merge mirror miss mix move
multiply name need note notice number obey occur offer omit open order outlive overlap overflow
overwrite own pack pad pair parse pass pay permit pin place plan plant play point poison poll
predict prefetch prefer prepare preserve prevent print produce promise protect prove provide
publish pull push put quote raise reach read reappear rebuild receive recompute record recur
reduce refer refuse register reject release rely remain remember remove rename repair repeat
replace reply report represent request require reserve reset reshard resolve restart restore
resume retain retry return reuse reveal rewrite ring rise rotate round rule run save say scale
scan search see seem select send separate serve set settle share shift shorten show shrink sign
sit skip sleep slip sort span spare spell spin split stand start state stay steal step stop store
stream strip succeed suffice sum summon support surround survive swap sweep switch sync take talk
tear tell terminate test throw tie time touch trace train transfer translate travel treat trust
try turn type understand undo unpack update use vary verify visit wait wake walk want warn waste
watch wear win wish work wrap write yield zero""".split()


def finite(verb):
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if re.search("[^aeiou]y$", verb) else verb + "s"


FINITE = set(AUXILIARY.split()) | set(VERBS) | {finite(verb) for verb in VERBS}


def files():
    yield from (ROOT / "README.md", ROOT / "CMakeLists.txt", ROOT / "dev")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.name.endswith(ENDINGS) and not path.relative_to(ROOT).as_posix().startswith(OTHERS):
                yield path


def texts(path):
    """Pairs of a line and a text: the comments and strings of a C source, else the whole file."""
    text = path.read_text()
    if path.suffix not in (".c", ".h", ".cu", ".cuh"):
        yield 1, BREAK.sub(" ", text)
        return
    for match in CODE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, BREAK.sub(" ", match[0])


def without_verb(text):
    """The sentences of a comment that begin with a capital letter and end in a full stop."""
    for sentence in SENTENCE.split(" ".join(text.strip("/* ").split())):
        words = re.findall(r"[a-z]+", sentence.lower())
        is_sentence = re.match(r"(?!Collective|Local)[A-Z][a-z].*[.]$", sentence) and len(words) > 3
        if is_sentence and not FINITE.intersection(words):
            yield sentence


def findings():
    for path in files():
        for line, text in texts(path):
            found = [(word, text[max(0, match.start() - 50):match.end() + 50])
                     for word, (pattern, _) in WORDS.items() if pattern
                     for match in re.finditer(pattern, text)]
            if text.startswith("/*"):
                found += [(NO_VERB, sentence) for sentence in without_verb(text)]
            for word, excerpt in found:
                yield word, f"{path.relative_to(ROOT)}:{line}: {excerpt}"


def main():
    counts = dict.fromkeys(WORDS, 0)
    for word, where in findings():
        counts[word] += 1
        if sys.argv[2:] == ["--list", word]:
            print(where)
    failed = [word for word, (_, limit) in WORDS.items() if counts[word] > limit]
    for word, (_, limit) in WORDS.items():
        more = "  <- too many (--list)" if word in failed else ""
        print(f"{word}: {counts[word]}, at most {limit}{more}")
    return 1 if failed else 0


sys.exit(main())
