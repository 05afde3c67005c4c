#!/usr/bin/env bash
# Every tool has a man page that scdoc accepts and that names each option of the tool's --help.
# usage: man.sh REPOSITORY BUILD
set -u
failed=0 count=0
for tool in "$2"/bin/fsdp-*; do
    page=$1/docs/man/$(basename "$tool").1.scd
    count=$((count + 1))
    if ! scdoc <"$page" >/dev/null; then
        echo "$page: missing, or not scdoc"
        failed=1
        continue
    fi
    for option in $("$tool" --help | grep -oE -- '--[a-z][a-z0-9-]+' | sort -u); do
        if ! grep -qE -- "$option([^a-z0-9-]|$)" "$page"; then
            echo "$page does not name $option"
            failed=1
        fi
    done
done
echo "$count tools"
[ "$count" -gt 0 ] && exit $failed
