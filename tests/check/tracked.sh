#!/usr/bin/env bash
# No file that .gitignore names is tracked: a checkout would replace what stands in its place, such as .peers.
# usage: tracked.sh REPOSITORY
set -u
cd "$1" || exit 1
if [ ! -e .git ]; then
    echo "these sources are no repository"
    exit 0
fi
tracked=$(git -c safe.directory='*' ls-files -ci --exclude-standard) || exit 1
if [ -n "$tracked" ]; then
    printf 'tracked, and named by .gitignore; git rm --cached removes them:\n%s\n' "$tracked"
    exit 1
fi
