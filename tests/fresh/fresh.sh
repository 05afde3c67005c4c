#!/usr/bin/env bash
# Types the commands of README.md on a bare Debian, as a new user does. ./dev fresh calls it.
# usage: fresh.sh [bookworm|trixie] [root|sudo|guest|cmake ...]
#
# Each scenario has a root of its own, build-fresh/RELEASE-SCENARIO, made by debootstrap's smallest variant:
# no locale, no toolkit, no MPI, no compiler. Mounts are private and end with the command.
#   root    ./dev demo and ./dev test, by root
#   sudo    the same, by a user who has sudo
#   guest   the same, by a user who has none: who is told what to ask for, and an administrator types it
#   cmake   the lines with CMake, by a user without sudo; then ./dev, over that build
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
WORK=$HERE/build-fresh
RELEASE=${1:-bookworm}
shift $(($# > 0))
[ $# -gt 0 ] || set -- root sudo guest cmake

die() { printf 'fresh: %s\n' "$*" >&2; exit 2; }
say() { printf '%s %s: %s\n' "$RELEASE" "$scenario" "$*" | tee -a "$WORK/summary"; }

case $RELEASE in bookworm | trixie) ;; *) die "it knows bookworm and trixie, not '$RELEASE'" ;; esac
# --- roots ----------------------------------------------------------------------------------------

# shellcheck source=tests/fresh/roots.sh
. "$HERE/tests/fresh/roots.sh"

# make_root SCENARIO: with the sources as they are in this checkout, and packages that other roots fetched.
make_root() {
    local root=$WORK/$RELEASE-$1 user=$2 home
    copy_base "$RELEASE-base" "$root"
    mkdir -p "$WORK/$RELEASE-packages"
    find "$WORK/$RELEASE-packages" -name '*.deb' -exec cp -t "$root/var/cache/apt/archives" {} +
    rm -f "$root/etc/apt/apt.conf.d/docker-clean"
    printf 'Binary::apt::APT::Keep-Downloaded-Packages "true";\nAPT::Keep-Downloaded-Packages "true";\n' \
        >"$root/etc/apt/apt.conf.d/keep"
    home=/root
    if [ "$user" != root ]; then
        home=/home/$user
        add_user "$root" "$user"
    fi
    mkdir -p "$root$home/fsdp"
    # what git lists and is not there was removed, and is not a failure
    git -C "$HERE" ls-files -coz --exclude-standard |
        tar -C "$HERE" --null -T - --ignore-failed-read --warning=no-failed-read -cf - |
        tar -C "$root$home/fsdp" -xf -
    chroot "$root" chown -R "$user:" "$home/fsdp"
    if [ "$user" = worker ]; then
        mkdir -p "$root/root/fsdp"
        inside "$root" root "apt-get -qq update && apt-get -qq install -y --no-install-recommends sudo" \
            >"$root.log" 2>&1 || die "sudo could not be installed: $root.log"
        echo 'worker ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/worker"
    fi
}

# --- commands -------------------------------------------------------------------------------------

# Lines of README.md that begin with a word, without their comments.
typed() { grep "^$1 " "$HERE/README.md" | sed 's/ *#.*//'; }

wrong=0

# types USER COMMAND CODE [TEXT]: COMMAND ends with CODE, and prints TEXT.
types() {
    local user=$1 command=$2 wanted=$3 text=${4:-} code=0 begun=$SECONDS closing
    printf '\n%s$ %s\n' "$user" "$command" >>"$root.log"
    inside "$root" "$user" "$command" >"$root.out" 2>&1 || code=$?
    cat "$root.out" >>"$root.log"
    closing=$(grep -E '^[0-9]+ passed, ' "$root.out" || true)
    say "$user\$ $command: exit $code in $((SECONDS - begun)) s${closing:+; $closing}"
    if [ "$code" != "$wanted" ]; then
        say "WRONG: exit $wanted is expected; see $root.log"
        wrong=$((wrong + 1))
    elif [ -n "$text" ] && ! grep -qF -- "$text" "$root.out"; then
        say "WRONG: it does not say '$text'; see $root.log"
        wrong=$((wrong + 1))
    fi
    find "$root/var/cache/apt/archives" -name '*.deb' -exec cp -ut "$WORK/$RELEASE-packages" {} +
}

# The administrator types the line that the user was given.
administrator_types() {
    local line
    line=$(sed -n 's/^    \(apt-get install .*\)/\1/p' "$root.out")
    mkdir -p "$root/root/fsdp"
    types root "apt-get -qq update && DEBIAN_FRONTEND=noninteractive $line -y -qq" 0
}

user_types_all() {
    local commands command
    mapfile -t commands < <(typed '\./dev')
    [ ${#commands[@]} = 2 ] || die "README.md has ${#commands[@]} commands of ./dev, not 2"
    for command in "${commands[@]}"; do
        types "$1" "$command" 0
    done
}

guest_asks_first() {
    types guest './dev demo' 2 'An administrator can, with:'
    administrator_types
    types guest './dev demo' 0
    types guest './dev test' 2 './dev build and ./dev demo work'
    administrator_types
    types guest './dev test' 0 ' passed, 0 failed'
}

guest_types_cmake() {
    local commands command
    typed apt-get | sed 's/^/    /' >"$root.out"
    administrator_types
    mapfile -t commands < <(typed cmake)
    [ ${#commands[@]} = 3 ] || die "README.md has ${#commands[@]} commands of cmake, not 3"
    for command in "${commands[@]}"; do
        types guest "$command" 0
    done
    types guest "\$HOME/.local/bin/fsdp-convert --version" 0
    types guest './dev build' 2 'An administrator can, with:'
    administrator_types
    types guest './dev build && ! test -e build/build.ninja' 0
}

for scenario in "$@"; do
    case $scenario in
    root) user=root ;;
    sudo) user=worker ;;
    guest | cmake) user=guest ;;
    *) die "it knows root, sudo, guest and cmake, not '$scenario'" ;;
    esac
    make_base "$RELEASE-base" "$RELEASE" ca-certificates
    root=$WORK/$RELEASE-$scenario
    make_root "$scenario" "$user"
    : >"$root.log"
    case $scenario in
    root | sudo) user_types_all "$user" ;;
    guest) guest_asks_first ;;
    cmake) guest_types_cmake ;;
    esac
    [ "$wrong" != 0 ] || rm -rf "$root"
done
scenario=all
say "$wrong wrong"
[ "$wrong" = 0 ]
