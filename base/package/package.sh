#!/usr/bin/env bash
# Makes the packages of fsdp. ./dev wheel, ./dev deb, ./dev tarball and ./dev release call it.
# usage: package.sh wheel|deb|tarball|release|pack|collect
#
#   wheel    build-wheel/dist/fsdp_toolkit-VERSION-py3-none-manylinux_2_28_x86_64.whl
#   tarball  build-wheel/dist/fsdp-VERSION-linux-x86_64.tar.xz: tools of one file each, the library, pages
#   deb      build-deb/dist/*.deb: fsdp-tools, libfsdp, libfsdp-dev for this distribution
#   release  all three in release/, with SHA256SUMS and the list of what they hold (SPDX)
#   pack, collect  for tests: wheel and tarball of the trees that are there; release/ of what was made
# The same commit gives the same bytes: files have the commit's time (SOURCE_DATE_EPOCH).
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cd "$root"
VERSION=$(sed -n 's/^project(fsdp VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
TAG=manylinux_2_28_x86_64

say() { printf '==> package: %s\n' "$*"; }
die() { printf 'package: %s\n' "$*" >&2; exit 1; }

make_wheel() {
    local dist=build-wheel/dist
    mkdir -p "$dist"
    rm -f "$dist"/*.whl
    /usr/bin/python3 "$here/wheel.py" build-wheel/tree build-wheel/build/python/fsdp "$VERSION" "$TAG" \
        "$SOURCE_DATE_EPOCH" "$dist"
    build-wheel/tools/bin/auditwheel show "$dist"/*.whl >"$dist/auditwheel.txt" ||
        die "auditwheel: $(cat "$dist/auditwheel.txt")"
    tr '\n' ' ' <"$dist/auditwheel.txt" | grep -q "consistent with the following platform tag: \"$TAG\"" ||
        die "the wheel is not $TAG: $(cat "$dist/auditwheel.txt")"
}

# Folders of the tree as they are; each tool is one file, and needs only glibc.
make_tarball() {
    local name=fsdp-$VERSION-linux-x86_64 file
    file=build-wheel/dist/$name.tar.xz
    # a dictionary that is larger than a tool: they have most of their code in common
    mkdir -p build-wheel/dist
    tar -C build-wheel --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
        --mode=u=rwX,go=rX --transform="s,^static,$name," -cf - static |
        xz -T1 --lzma2=preset=1,dict=16MiB >"$file"
    printf '%s\n' "$file"
}

# ./dev compiles in build-deb, for /usr and with the libraries of the distribution.
make_debs() {
    local package=build-deb/package
    rm -rf "$package" build-deb/*.deb build-deb/*.changes build-deb/*.buildinfo build-deb/dist
    mkdir -p "$package" build-deb/dist
    cp -r "$here/debian" "$package"
    sed -e "s/@VERSION@/$VERSION/" -e "s/@DATE@/$(date -u -R -d "@$SOURCE_DATE_EPOCH")/" \
        "$here/debian/changelog.in" >"$package/debian/changelog"
    (
        cd "$package"
        BUILD=$root/build-deb VERSION=$VERSION DEB_BUILD_OPTIONS=noautodbgsym \
            dpkg-buildpackage --build=binary --no-sign --no-check-builddeps
    ) >build-deb/package.log 2>&1 || { tail -n 30 build-deb/package.log >&2; die "dpkg-buildpackage failed"; }
    mv build-deb/*.deb build-deb/*.changes build-deb/*.buildinfo build-deb/dist
    printf '%s\n' build-deb/dist/*.deb
    lintian --allow-root --fail-on error,warning,info --display-info build-deb/dist/*.changes ||
        die "lintian has found something in the packages of Debian"
}

make_release() {
    rm -rf release
    mkdir release
    cp build-wheel/dist/*.whl build-wheel/dist/*.tar.xz build-deb/dist/*.deb release
    /usr/bin/python3 "$here/sbom.py" "$VERSION" "$SOURCE_DATE_EPOCH" build-wheel/sources release/* \
        >"release/fsdp-$VERSION.spdx.json"
    (cd release && sha256sum -- * >SHA256SUMS)
    ls -l release
}

case ${1:-} in
wheel)
    "$here/portable.sh"
    make_wheel
    ;;
tarball)
    "$here/portable.sh"
    make_tarball
    ;;
deb) make_debs ;;
pack)
    make_wheel
    make_tarball
    ;;
collect) make_release ;;
release)
    "$here/portable.sh"
    make_wheel
    make_tarball
    make_debs
    make_release
    ;;
*) die "it makes wheel, deb, tarball or release, not '${1:-}'" ;;
esac
