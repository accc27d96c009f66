#!/usr/bin/env bash
# `bazelw run //:lint`: every linter over the source tree; all run, all report.
# `-- --fix` formats what can be formatted.
set -uo pipefail
# The package as it is installed: its sources live in two folders.
runfiles=${RUNFILES_DIR:-$0.runfiles}
tree=$runfiles/@TREE@ python=@PYTHON@
site=$(<"$runfiles/@SITE@") buildifier=$(<"$runfiles/@BUILDIFIER@")
cd "${BUILD_WORKSPACE_DIRECTORY:?run this with: bazelw run //:lint}" || exit 1
export PYTHONPATH=$site MYPYPATH=$tree MYPY_CACHE_DIR=${TMPDIR:-/tmp}/pagemill-mypy-$UID RUFF_NO_CACHE=true
fix=
[ "${1:-}" = --fix ] && fix=1
failed=()

run() { # name, command ...
  local name=$1 output
  shift
  if output=$("$@" 2>&1); then
    echo "lint: $name: ok"
  else
    echo "lint: $name: FAILED"
    sed 's/^/  /' <<<"$output"
    failed+=("$name")
  fi
}

mapfile -t cc < <(git ls-files --cached --others --exclude-standard '*.cc' '*.h')
mapfile -t bazel < <(git ls-files --cached --others --exclude-standard '*.bzl' '*.bazel')

if [ -n "$fix" ]; then "$site/bin/ruff" check --fix --quiet .; "$site/bin/ruff" format --quiet .; fi
run "ruff check" "$site/bin/ruff" check --output-format=concise .
run "ruff format" "$site/bin/ruff" format --check .
run "mypy" "$python" -I -c "import sys; sys.path[:0] = ['$site']; from mypy.__main__ import console_entry; console_entry()" \
  --config-file pyproject.toml
if [ -n "$fix" ]; then "$site/bin/clang-format" -i "${cc[@]}"; fi
run "clang-format" "$site/bin/clang-format" --dry-run --Werror "${cc[@]}"
run "layers" "$python" -I tools/check_layers.py
if [ -n "$buildifier" ]; then
  if [ -n "$fix" ]; then "$buildifier" -mode=fix "${bazel[@]}"; fi
  run "buildifier" "$buildifier" -mode=check -lint=warn -warnings=-module-docstring "${bazel[@]}"
else
  echo "lint: buildifier: skipped, npm was not found when the linters were installed"
fi

if [ ${#failed[@]} -gt 0 ]; then
  echo "lint: ${#failed[@]} failed: ${failed[*]}"
  exit 1
fi
echo "lint: all passed"
