#!/usr/bin/env bash
# Bare roots of Debian, made by debootstrap in $WORK; for scripts that set WORK and have die.
# shellcheck disable=SC2154 # WORK
set -euo pipefail

# The mirror that this machine's apt takes Debian from; nothing where it has none: debootstrap knows one.
mirror() {
    # shellcheck disable=SC2016 # apt-get expands it
    apt-get indextargets --format '$(SITE) $(ORIGIN) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
        sed -n 's,^\([^ ]*[^y]\) Debian main$,\1,p' | head -n 1
}

# inside ROOT USER COMMAND: a login of USER types COMMAND in the project's folder. Mounts are private and end
# with the command.
inside() {
    local root=$1 user=$2 home=/home/$2
    [ "$user" != root ] || home=/root
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount --pid --fork --kill-child bash -ec '
        mount -t proc proc "$1/proc"
        mount --rbind /sys "$1/sys"
        mount --rbind /dev "$1/dev"
        mount -t tmpfs -o mode=1777 shm "$1/dev/shm"
        exec chroot "$1" su --login "$2" --command "cd \"$3/fsdp\" && $4"' \
        - "$root" "$user" "$home" "$3" </dev/null
}

# make_base NAME RELEASE PACKAGES: the smallest variant with PACKAGES, once.
make_base() {
    local base=$WORK/$1 mirrors
    [ "$(cat "$base/complete" 2>/dev/null)" != "$2 $3" ] || return 0
    [ "$(id -u)" = 0 ] || die "only root can make a root of Debian: use sudo"
    command -v debootstrap >/dev/null || die "it needs debootstrap: apt-get install debootstrap"
    mkdir -p "$WORK"
    rm -rf "$base"
    mapfile -t mirrors < <(mirror)
    debootstrap --variant=minbase --include="$3" "$2" "$base" "${mirrors[@]}" >"$base.log" 2>&1 ||
        die "debootstrap failed: $base.log"
    printf '%s\n' "$2 $3" >"$base/complete"
}

# copy_base NAME ROOT: with this machine's way to Debian's packages.
copy_base() {
    local root=$2
    rm -rf "$root"
    cp -a --reflink=auto "$WORK/$1" "$root"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" >"$root/etc/hosts" # as the installer does
    grep -lsi 'acquire::.*proxy' /etc/apt/apt.conf.d/* | xargs -r cp -t "$root/etc/apt/apt.conf.d" || true
}

add_user() { # ROOT USER
    chroot "$1" useradd --create-home --shell /bin/bash "$2"
}
