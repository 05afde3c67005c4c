"""Makes the recording of the README from a run of ./dev demo, which calls it: ./dev demo --record.

usage: record.py DEMO_DIRECTORY TARGET_DIRECTORY

Reads output.txt, which the demo printed, and draws it as a terminal: TARGET/demo.svg. Copies the picture of the
training: TARGET/plot.svg.
"""

import shutil
import sys
from pathlib import Path
from xml.sax.saxutils import escape

DEMO, TARGET = Path(sys.argv[1]), Path(sys.argv[2])
COLUMNS, FONT, LINE, CHARACTER, MARGIN = 104, 12, 16, 7.25, 14
STYLES = {"$": "#7ee787", "=": "#d2a8ff", "": "#c9d1d9"}  # commands, what the demo says, output


def lines():
    """The lines of the terminal, at most COLUMNS wide."""
    for line in (DEMO / "output.txt").read_text(errors="replace").replace(str(DEMO.resolve()), str(DEMO)).splitlines():
        text = "".join(c if c.isprintable() else " " for c in line)
        yield text if len(text) <= COLUMNS else text[:COLUMNS - 1] + "…"


def main():
    shown = list(lines())
    width, height = round(COLUMNS * CHARACTER) + 2 * MARGIN, len(shown) * LINE + 2 * MARGIN
    rows = []
    for number, line in enumerate(shown):
        color = STYLES.get(line[:1], STYLES[""])
        rows.append(f'<text x="{MARGIN}" y="{MARGIN + FONT + number * LINE}" fill="{color}">{escape(line)}</text>\n')
    TARGET.mkdir(exist_ok=True)
    (TARGET / "demo.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="ui-monospace, monospace" font-size="{FONT}" xml:space="preserve">\n'
        f"<title>a run of ./dev demo</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>\n{"".join(rows)}</svg>\n')
    shutil.copyfile(DEMO / "run.svg", TARGET / "plot.svg")


main()
