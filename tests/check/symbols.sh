#!/usr/bin/env bash
# The shared libraries export only fsdp_ names, and the library never ends the process or prints:
# that is its caller's business. fsdp_launch is a program's main, and does both. Neither libraries nor
# programs look for libraries in the current directory. usage: symbols.sh BUILD
set -u
failed=0

for library in "$1"/lib/libfsdp*.so; do
    exported=$(nm -D --defined-only "$library" | awk '{ print $3 }')
    foreign=$(grep -v '^fsdp_' <<<"$exported")
    echo "$(basename "$library"): $(wc -l <<<"$exported") exported symbols"
    if [ -z "$exported" ] || [ -n "$foreign" ]; then
        echo "exported, but not fsdp_: $foreign"
        failed=1
    fi
done

forbidden='_?exit|_Exit|quick_exit|abort|__assert_fail|stdout|stderr'
forbidden+='|(__)?v?f?printf(_chk)?|puts|fputs|putchar|fputc|perror'
used=$(nm -A -u "$1"/lib/libfsdp{,_wrap}.a | sed -E 's/^[^:]*:([^:]*): *[UwV] ([^@]*).*/\1 \2/' |
    grep -E " ($forbidden)\$" |
    grep -v '^hdf5_child_reply.c.o _exit$' | # the end of a process of our own
    grep -vE '^launch(_processes|_supervise|_threads)?.c.o (_?exit|stderr|__fprintf_chk|fwrite)$') # a main
if [ -n "$used" ]; then
    printf 'the library must not use:\n%s\n' "$used"
    failed=1
fi

for file in "$1"/lib/libfsdp*.so "$1"/bin/*; do
    path=$(readelf -d "$file" | sed -nE 's/.*R(UN)?PATH.*\[(.*)\]/\2/p')
    if [[ $path && ":$path:" == *::* ]]; then
        echo "$(basename "$file") looks for libraries in the current directory: '$path'"
        failed=1
    fi
done
exit $failed
