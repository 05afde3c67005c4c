#!/bin/sh
# The tools of fsdp that pip installed: found next to this script, and started without Python.
# As "fsdp COMMAND ..." it starts fsdp-COMMAND; under the name of a tool it starts that tool.
version=@VERSION@

name=${0##*/}
script=$0
case $script in
*/*) ;;
*) script=$(command -v -- "$script") ;;
esac
while [ -L "$script" ]; do
    target=$(readlink -- "$script")
    case $target in
    /*) script=$target ;;
    *) script=${script%/*}/$target ;;
    esac
done
bin=${script%/*}
case $name in
fsdp | fsdp-*) ;;
*) name=${script##*/} ;; # a link to it has another name
esac

# The package of this version: several Pythons may share a folder of scripts.
tools=''
for site in "$bin"/../lib/python3*/site-packages "$bin"/../lib64/python3*/site-packages \
    "$bin"/../lib/python3*/dist-packages "$bin"/../local/lib/python3*/dist-packages "$bin"/..; do
    if [ -d "$site/fsdp_toolkit-$version.dist-info" ] && [ -x "$site/fsdp/bin/fsdp-ls" ]; then
        tools=$site/fsdp/bin
        break
    fi
done
if [ -z "$tools" ]; then
    printf '%s: fsdp-toolkit %s is not installed next to %s: install it again\n' "$name" "$version" "$bin" >&2
    exit 70
fi

list() {
    printf 'usage: fsdp COMMAND ...\n\n'
    for tool in "$tools"/fsdp-*; do
        printf '  %s\n' "${tool##*/fsdp-}"
    done
    printf '\nfsdp COMMAND --help describes a command; fsdp --version prints the version.\n'
}

if [ "$name" = fsdp ]; then
    case ${1---help} in
    -h | --help | help)
        list
        exit 0
        ;;
    --version)
        printf 'fsdp %s\n' "$version"
        exit 0
        ;;
    esac
    if [ ! -x "$tools/fsdp-$1" ]; then
        printf "fsdp: there is no command '%s'\n" "$1" >&2
        list >&2
        exit 2
    fi
    name=fsdp-$1
    shift
fi
exec "$tools/$name" "$@"
