#!/usr/bin/env bash
# The compiler and the libraries of portable.sh, which reads this file; kept in $work between runs:
#   tools     ziglang (Clang and LLD with the headers and symbols of every glibc), auditwheel
#   sources   Debian's source packages of bundled.txt
#   deps      what they compile to, and their licences; again when bundled.txt or this file changes
# Debian's own static libraries cannot be used: they are not position independent.
# shellcheck disable=SC2154 # root, here, work and output are portable.sh's
set -euo pipefail
PINS=(ziglang==0.17.1 auditwheel==6.8.2 packaging==26.4 pyelftools==0.33)
GLIBC=2.28
FLAGS="-O2 -fPIC -fvisibility=hidden -DNDEBUG"

# --- tools and sources ----------------------------------------------------------------------------

make_tools() {
    [ "$(cat "$work/tools/complete" 2>/dev/null)" != "${PINS[*]}" ] || return 0
    say "installing ${PINS[*]}"
    rm -rf "$work/tools"
    /usr/bin/python3 -m venv "$work/tools"
    "$work/tools/bin/python" -m pip install -q --no-compile "${PINS[@]}"
    local zig
    zig=$("$work/tools/bin/python" -c 'import os, ziglang; print(os.path.dirname(ziglang.__file__))')/zig
    # In its debug mode, which is that of tests by configure, zig adds checks of undefined behaviour.
    printf '#!/bin/sh\nexec "%s" cc -target x86_64-linux-gnu.%s -fno-sanitize=undefined -g0 "$@"\n' \
        "$zig" "$GLIBC" >"$work/tools/bin/cc"
    printf '#!/bin/sh\nexec "%s" ar "$@"\n' "$zig" >"$work/tools/bin/ar"
    chmod +x "$work/tools/bin/cc" "$work/tools/bin/ar"
    printf '%s\n' "${PINS[*]}" >"$work/tools/complete"
}

bundled() { grep -v '^#' "$here/bundled.txt"; }

# Lines for apt: the places of Debian's packages that this machine has, for sources.
source_places() {
    local key=/usr/share/keyrings/debian-archive-keyring.gpg signed=''
    [ ! -e "$key" ] || signed="[signed-by=$key] "
    # shellcheck disable=SC2016 # apt-get expands it
    apt-get indextargets --format '$(SITE) $(CODENAME) $(COMPONENT) $(ORIGIN)' 'Created-By: Packages' |
        sed -n "s,^\([^ ]*\) \([^ ]*\) main Debian\$,deb-src $signed\1 \2 main,p" | sort -u
}

# Every file is checked: those of a .dsc by dpkg-source, the .dsc by bundled.txt.
get_sources() {
    local name package version sum _ lists=$work/lists missing=()
    mkdir -p "$work/sources"
    while read -r name package version sum _; do
        [ -e "$work/sources/${package}_${version#*:}.dsc" ] || missing+=("$package=$version")
    done < <(bundled)
    if [ ${#missing[@]} -gt 0 ]; then
        say "fetching the sources of ${missing[*]}"
        mkdir -p "$lists/partial"
        source_places >"$work/sources.list"
        local apt=(apt-get -qq -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=-
            -o Dir::State::lists="$lists" -o APT::Sandbox::User=root)
        "${apt[@]}" update
        (cd "$work/sources" && "${apt[@]}" source --download-only "${missing[@]}") ||
            die "apt has no sources of Debian 12 here, which the wheel is made from: ${missing[*]}"
    fi
    while read -r name package version sum _; do
        printf '%s  %s\n' "$sum" "$work/sources/${package}_${version#*:}.dsc"
    done < <(bundled) | sha256sum --check --quiet
}

# --- dependencies ---------------------------------------------------------------------------------

unpack() { # NAME: into ./NAME
    local package version
    read -r _ package version _ < <(bundled | grep "^$1 ")
    quietly "$1.unpack" dpkg-source --no-copy --require-strong-checksums --extract \
        "$work/sources/${package}_${version#*:}.dsc" "$1"
    mkdir -p "$prefix/licenses"
    cp "$1/debian/copyright" "$prefix/licenses/$1.txt"
}

# describe MODULE VERSION LIBS: for pkg-config.
describe() {
    cat >"$prefix/lib/pkgconfig/$1.pc" <<TEXT
prefix=\${pcfiledir}/../..
Name: $1
Description: compiled for the wheel
Version: $2
Libs: -L\${prefix}/lib $3
Cflags: -I\${prefix}/include
TEXT
}

version_of() { # NAME: without what Debian adds
    bundled | sed -n "s/^$1  *[^ ]*  *\([0-9]*:\)\?\([0-9.]*[0-9]\).*/\2/p"
}

# archive NAME FILE...: compiles plain C.
archive() {
    local name=$1
    shift
    mkdir -p "objects-$name"
    # shellcheck disable=SC2016 # the inner shell expands them
    printf '%s\n' "$@" | xargs -P "$JOBS" -I{} sh -c '$1 -c "$2" -o "$3/$(basename "$2" .c).o"' - \
        "$CC $FLAGS -w -ffile-prefix-map=$PWD=. ${DEFINES:-}" {} "objects-$name" >"$name.log" 2>&1 ||
        { tail -n 30 "$name.log" >&2; die "$name does not compile"; }
    (cd "objects-$name" && "$AR" rcsD "$prefix/lib/lib$name.a" ./*.o)
}

make_zlib() {
    unpack zlib
    DEFINES="-DHAVE_UNISTD_H -D_LARGEFILE64_SOURCE=1" archive z \
        zlib/{adler32,compress,crc32,deflate,gzclose,gzlib,gzread,gzwrite,infback,inffast,inflate}.c \
        zlib/{inftrees,trees,uncompr,zutil}.c
    cp zlib/zlib.h zlib/zconf.h "$prefix/include"
    describe zlib "$(version_of zlib)" -lz
}

make_zstd() {
    unpack zstd
    DEFINES="-DZSTD_MULTITHREAD -DZSTDLIB_VISIBLE= -DZSTDERRORLIB_VISIBLE= -DZSTD_DISABLE_ASM" \
        archive zstd zstd/lib/{common,compress,decompress}/*.c
    cp zstd/lib/zstd.h zstd/lib/zstd_errors.h "$prefix/include"
    describe libzstd "$(version_of zstd)" "-lzstd -lpthread"
}

make_xxhash() { # its functions are inline
    unpack xxhash
    cp xxhash/xxhash.h "$prefix/include"
    describe libxxhash "$(version_of xxhash)" ''
}

make_libseccomp() {
    unpack libseccomp
    (
        cd libseccomp
        quietly ../libseccomp.log ./configure --prefix="$prefix" --disable-shared --host=x86_64-linux-gnu
        quietly ../libseccomp.log make -C src -j "$JOBS" libseccomp.la
    )
    cp libseccomp/src/.libs/libseccomp.a "$prefix/lib"
    cp libseccomp/include/seccomp.h libseccomp/include/seccomp-syscalls.h "$prefix/include"
    describe libseccomp "$(version_of libseccomp)" -lseccomp
}

# The summary of its configuration is part of the library: without the machine, the time and the folders.
make_hdf5() {
    unpack hdf5
    mkdir hdf5-build
    (
        cd hdf5-build
        # One function leaves its result's type out, which is int.
        CFLAGS="$FLAGS -Wno-implicit-int -w -ffile-prefix-map=$PWD/..=." \
            quietly ../hdf5.log ../hdf5/configure --prefix="$prefix" --disable-shared --enable-static \
            --disable-hl --disable-tests --disable-tools --disable-cxx --disable-fortran --disable-java \
            --without-szlib --with-zlib="$prefix" --enable-build-mode=production
        sed -i -e 's/\(Configured on\|Configured by\|Uname information\|Installation point\):.*/\1:/' \
            -e "s,${work}[^ ]*/,," -e 's/-ffile-prefix-map=[^ ]*//' src/libhdf5.settings
        quietly ../hdf5.log make -C src -j "$JOBS"
        quietly ../hdf5.log make -C src install
    )
    describe hdf5 "$(version_of hdf5)" "-lhdf5 -lz -ldl -lm"
}

make_deps() {
    local key name
    key=$(cat "$here/bundled.txt" "$here/dependencies.sh" | sha256sum)
    prefix=$work/deps
    [ "$(cat "$prefix/complete" 2>/dev/null)" != "$key" ] || return 0
    make_tools
    get_sources
    say "compiling the dependencies"
    rm -rf "$prefix" "$work/deps-build"
    mkdir -p "$prefix/include" "$prefix/lib/pkgconfig" "$work/deps-build"
    cd "$work/deps-build"
    for name in zlib zstd xxhash libseccomp hdf5; do
        make_$name
    done
    cd "$root"
    rm -rf "$work/deps-build"
    printf '%s\n' "$key" >"$prefix/complete"
}
