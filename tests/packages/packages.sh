#!/usr/bin/env bash
# Installs the packages as a user does, on bare roots of Debian that have no HDF5, no compiler's libraries of
# ours, nothing of this build. ./dev packages calls it, and CI. Roots are kept in build-fresh.
# usage: packages.sh SCENARIO
#
#   roots      only makes the roots: Debian 11 with Python 3.9; Debian 12 with Python 3.11 and a C compiler
#   same       the wheel compiled in another folder has the same bytes, and none of its files names a folder
#   needs      its size, its tag, and that programs and libraries ask for nothing but glibc
#   equal      its tools convert and train to the same bytes as those of the build for Debian, by GCC
#   python3.9, python3.11  pip install into an empty environment, import, every tool; with 3.11 C programs
#   debs       apt-get install of the three packages, every tool, a C program, and purge
#   tarball    unpacked on Debian 11: every tool, also when it is moved alone
#   release    checksums, and a list that names each library that is inside
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
WORK=$HERE/build-fresh
TOOLS=(bench convert diff gc inspect ls plot train verify)
GOLDEN=tests/golden/native/v1/sharded
AGE='s/, [^,]* ago,/,/' # of a copy it is another one

die() { printf 'packages: %s\n' "$*" >&2; exit 1; }
skip() { printf 'skipped: %s\n' "$*"; exit 77; }

# shellcheck source=tests/fresh/roots.sh
. "$HERE/tests/fresh/roots.sh"
cd "$HERE"
version=$(sed -n 's/^project(fsdp VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
scratch=$(mktemp -d)
root=''
trap 'rm -rf "$scratch" ${root:+"$root"}' EXIT

make_roots() {
    [ "$(id -u)" = 0 ] || skip "only root can make a root of Debian"
    make_base bullseye-python bullseye python3,python3-venv,xz-utils
    make_base bookworm-python bookworm \
        python3,python3-venv,gcc,libc6-dev,pkg-config,cmake,make,ca-certificates,xz-utils
}

# new_root RELEASE FILE...: a copy, with the files, a golden checkpoint and a user's sources in ~user/fsdp.
new_root() {
    make_roots
    root=$WORK/$1-$scenario
    copy_base "$1-python" "$root"
    shift
    add_user "$root" user
    mkdir -p "$root/home/user/fsdp" "$root/root/fsdp"
    cp -rL "$@" "$GOLDEN" "$root/home/user/fsdp"
    cp -r --parents tests/consumer docs/examples "$root/home/user/fsdp"
    chroot "$root" chown -R user: /home/user
    build-deb/bin/fsdp-ls "$GOLDEN" | sed -e "s,$GOLDEN,sharded," -e "$AGE" >"$root/home/user/fsdp/wanted"
}

user() { inside "$root" user "set -eu; $1"; }

# every_tool PREFIX: prints its version, and lists the golden checkpoint as the build for Debian does.
every_tool() {
    local tool
    for tool in "${TOOLS[@]}"; do
        user "$1$tool --version | head -n 1 | grep -qxF 'fsdp-$tool (fsdp) $version'" || die "$1$tool"
    done
    user "$1ls sharded | sed '$AGE' >got; diff wanted got"
    user "$1verify --quiet sharded"
}

# A C program is built against the package that pkg-config and, with a second word, CMake find by DIRS.
c_programs() { # PKG-CONFIG-PATH [CMAKE-PREFIX]
    user "PKG_CONFIG_PATH=$1; export PKG_CONFIG_PATH
        gcc tests/consumer/mesh_size.c -o by-pc \$(pkg-config --cflags --libs fsdp) \
            -Wl,-rpath,\$(pkg-config --variable=libdir fsdp)
        test \"\$(./by-pc)\" = 'a mesh of 6 ranks'"
    [ -n "${2:-}" ] || return 0
    user "cmake -S tests/consumer/cmake -B by-cmake -DLIBRARIES=fsdp -DCMAKE_PREFIX_PATH=$2 >log
        cmake --build by-cmake --target with_fsdp --target train_fsdp >>log
        test \"\$(by-cmake/with_fsdp)\" = 'a mesh of 6 ranks'
        by-cmake/train_fsdp --np 2 >losses; test \$(wc -l <losses) = 20"
}

# Of the wheel as it lies in build-wheel/dist.
unpack_wheel() { /usr/bin/python3 -m zipfile -e build-wheel/dist/*.whl "$scratch/wheel"; }

try_same() {
    local first
    first=$(sha256sum <build-wheel/dist/fsdp_toolkit-*.whl)
    cp -r build-wheel/dist "$scratch/dist"
    base/package/portable.sh "$scratch/other" >"$scratch/log" 2>&1 || die "$(tail -n 30 "$scratch/log")"
    diff -r build-wheel/tree "$scratch/other/tree"
    diff -r build-wheel/static "$scratch/other/static"
    base/package/package.sh pack >"$scratch/log"
    [ "$(sha256sum <build-wheel/dist/fsdp_toolkit-*.whl)" = "$first" ] || die "a second wheel has other bytes"
    cmp build-wheel/dist/*.tar.xz "$scratch"/dist/*.tar.xz
    unpack_wheel
    if grep -rlF -e "$HERE" -e "$scratch" "$scratch/wheel"; then
        die "these files of the wheel name folders of this machine"
    fi
}

try_needs() {
    local size file needed
    size=$(stat -c %s build-wheel/dist/*.whl)
    printf 'the wheel has %d bytes\n' "$size"
    [ "$size" -le 14000000 ] || die "the wheel has $size bytes, and may have 14 MB"
    grep -q 'platform tag: "manylinux_2_28_x86_64"' build-wheel/dist/auditwheel.txt
    unpack_wheel
    while read -r file; do
        needed=$(readelf -d "$file" 2>/dev/null | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
            grep -vxE 'lib(c|m|pthread|dl|rt)\.so\.[0-9]+|ld-linux-x86-64\.so\.2' || true)
        case $file:$needed in
        *: | */fsdp/bin/*:libfsdp.so.0) ;;
        *) die "$file needs $needed" ;;
        esac
        if strings -a "$file" | grep -oE 'GLIBC_2\.[0-9]+' | sort -uV | awk -F. '$2 > 28 { exit 1 }'; then
            continue
        fi
        die "$file needs symbols of glibc after 2.28"
    done < <(find "$scratch/wheel" build-wheel/static -type f \( -path '*/bin/*' -o -name '*.so.0' -o \
        -name '*_h5zstd.so' \))
    [ "$(nm -D --defined-only "$scratch/wheel/fsdp/lib/libfsdp.so.0" | grep -vc ' fsdp_')" = 0 ] ||
        die "libfsdp.so.0 shows functions of other libraries"
}

# run_tools BIN FOLDER: what conversions and a training write.
run_tools() {
    local PATH=$1:$PATH
    mkdir "$2"
    (
        cd "$2"
        exec >"$2.log" 2>&1
        fsdp-bench make --quiet --model gpt2 --scale 0.01 --world-size 3 --seed 1 ckpt
        fsdp-convert --quiet ckpt on-2 --world-size 2 --compress zstd
        fsdp-convert --quiet ckpt model.safetensors -I '^model'
        fsdp-convert --quiet ckpt dcp --to dcp --world-size 2
        fsdp-convert --quiet ckpt all.pt
        fsdp-convert --quiet ckpt all.h5
        seq 3000 >numbers.txt
        fsdp-train --run trained --data.path numbers.txt --model.layers 2 --model.width 32 \
            --train.steps 5 --np 2
        FSDP_KERNELS=c fsdp-train --run plain --data.path numbers.txt --model.layers 1 --model.width 16 \
            --train.steps 3
        fsdp-convert --quiet trained hf --to hf
        fsdp-convert --quiet hf small.gguf --dtype q8_0
        # which kernels and products were chosen, and losses; without times and speeds
        sed -i -e 's/^[^ ]* [^ ]*  //' -e 's/ *[0-9]* tok.s$//' {trained,plain}/main.log
        rm {trained,plain}/{metrics.jsonl,events*}
    )
}

try_equal() {
    unpack_wheel
    chmod +x "$scratch"/wheel/fsdp/bin/*
    run_tools "$scratch/wheel/fsdp/bin" "$scratch/of-wheel"
    run_tools "$HERE/build-deb/bin" "$scratch/of-build"
    diff -r "$scratch/of-wheel" "$scratch/of-build"
    printf '%d files are equal\n' "$(find "$scratch/of-wheel" -type f | wc -l)"
}

try_wheel() { # RELEASE VERSION
    new_root "$1" build-wheel/dist/*.whl
    user "python3 -c 'import sys; assert sys.version_info[:2] == ($2)'
        python3 -m venv env; env/bin/python -m pip install --no-index fsdp_toolkit-*.whl
        env/bin/python -m pip check"
    every_tool env/bin/fsdp-
    every_tool 'env/bin/fsdp '
    every_tool 'env/bin/python -m fsdp '
    user "test \"\$(env/bin/fsdp --version)\" = 'fsdp $version'; env/bin/fsdp | grep -qw convert
        ln -s \$PWD/env/bin/fsdp-ls elsewhere; ./elsewhere sharded | sed '$AGE' | diff wanted -
        if env/bin/fsdp nothing 2>errors; then exit 1; fi; grep -q 'no command' errors
        test -e env/share/man/man1/fsdp-convert.1
        test -e env/share/bash-completion/completions/fsdp-convert"
    user "cat >try.py <<'TEXT'
import fsdp
assert fsdp.__version__ == '$version'
with fsdp.open('sharded') as checkpoint:
    assert len(list(checkpoint.keys())) > 0
TEXT
        env/bin/python try.py"
    user "env/bin/python -m pip install -q --no-index --target target fsdp_toolkit-*.whl
        target/bin/fsdp-ls sharded | sed '$AGE' | diff wanted -"
    case $1 in bookworm)
        c_programs "\$(env/bin/python -m fsdp --pkg-config)" "\$(env/bin/python -m fsdp --cmake)"
        ;;
    esac
    user "env/bin/python -m pip uninstall -qy fsdp-toolkit
        if find env -type f | grep fsdp; then exit 1; fi"
}

try_debs() {
    new_root bookworm build-deb/dist/*.deb
    inside "$root" root "apt-get -qq update && cd /home/user/fsdp &&
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends ./*.deb" \
        >"$scratch/log" 2>&1 || die "$(tail -n 30 "$scratch/log")"
    every_tool fsdp-
    c_programs '' /usr
    user "test -e /usr/share/man/man1/fsdp-convert.1.gz
        test \$(dpkg-query -W -f '\${Version}' fsdp-tools) = $version"
    inside "$root" root "apt-get -qq purge -y fsdp-tools libfsdp libfsdp-dev" >"$scratch/log" 2>&1
    user "if find /usr /etc -name '*fsdp*' 2>/dev/null | grep .; then exit 1; fi"
}

try_tarball() {
    local name=fsdp-$version-linux-x86_64
    new_root bullseye "build-wheel/dist/$name.tar.xz"
    user "tar -xf $name.tar.xz"
    every_tool "$name/bin/fsdp-"
    user "mkdir alone; cp $name/bin/fsdp-ls alone; alone/fsdp-ls sharded | sed '$AGE' | diff wanted -
        for path in include/fsdp lib/libfsdp.so.0 lib/pkgconfig/fsdp.pc share/man/man1/fsdp-ls.1 licenses
        do
            test -e $name/\$path
        done"
}

try_release() {
    base/package/package.sh collect >"$scratch/log"
    (cd release && sha256sum --check --quiet SHA256SUMS)
    [ "$(find release -type f | wc -l)" = 7 ] || die "release/ has not 7 files: $(ls release)"
    /usr/bin/python3 - "$version" <<'TEXT'
import hashlib, json, pathlib, sys
listed = json.loads(pathlib.Path(f"release/fsdp-{sys.argv[1]}.spdx.json").read_text())
assert listed["spdxVersion"] == "SPDX-2.3"
packages = {package["SPDXID"]: package for package in listed["packages"]}
wheel = next(package for package in packages.values() if package["name"].endswith(".whl"))
file = pathlib.Path("release", wheel["name"])
assert wheel["checksums"][0]["checksumValue"] == hashlib.sha256(file.read_bytes()).hexdigest()
inside = {packages[r["relatedSpdxElement"]]["name"] for r in listed["relationships"]
          if r["spdxElementId"] == wheel["SPDXID"] and r["relationshipType"] == "CONTAINS"}
assert inside == {"hdf5", "zstd", "zlib", "xxhash", "libseccomp"}, inside
TEXT
}

scenario=${1:-}
case $scenario in
roots) make_roots ;;
same | needs | equal | debs | tarball | release) "try_$scenario" ;;
python3.9) try_wheel bullseye '3, 9' ;;
python3.11) try_wheel bookworm '3, 11' ;;
*) die "it does not know '$scenario'" ;;
esac
printf 'ok %s\n' "$scenario"
