#!/usr/bin/env bash
# Every tool has a man page that scdoc accepts, that names each option of the tool's --help, and
# that describes no other. usage: man.sh REPOSITORY BUILD
set -u
failed=0 count=0

# The options in a text, one a line.
options_in() { grep -oE -- '--[a-z][a-z0-9-]+' | sort -u; }

for tool in "$2"/bin/fsdp-*; do
    page=$1/docs/man/$(basename "$tool").1.scd
    count=$((count + 1))
    if ! scdoc <"$page" >/dev/null; then
        echo "$page: missing, or not scdoc"
        failed=1
        continue
    fi
    listed=$("$tool" --help | options_in)
    missing=$(comm -23 <(echo "$listed") <(options_in <"$page"))
    # Headings of the page's options begin with a star and a dash.
    unknown=$(comm -13 <(echo "$listed") <(grep -E '^\*-' "$page" | options_in))
    if [ -n "$missing$unknown" ]; then
        echo "$page does not name [$missing]; --help does not list [$unknown]"
        failed=1
    fi
done
echo "$count tools"
[ "$count" -gt 0 ] && exit $failed
