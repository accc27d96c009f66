#!/usr/bin/env bash
# `bazelw run //:lint`: every linter over the source tree; all run, all report.
# `-- --fix` formats what can be formatted.
set -uo pipefail
cd "${BUILD_WORKSPACE_DIRECTORY:?run this with: bazelw run //:lint}" || exit 1
site=@SITE@ python=@PYTHON@
export PYTHONPATH=$site MYPY_CACHE_DIR=${TMPDIR:-/tmp}/pagemill-mypy-$UID RUFF_NO_CACHE=true
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
if [ -x "@BUILDIFIER@" ]; then
  if [ -n "$fix" ]; then "@BUILDIFIER@" -mode=fix "${bazel[@]}"; fi
  run "buildifier" "@BUILDIFIER@" -mode=check -lint=warn -warnings=-module-docstring "${bazel[@]}"
else
  echo "lint: buildifier: skipped, npm was not found when the linters were installed"
fi

if [ ${#failed[@]} -gt 0 ]; then
  echo "lint: ${#failed[@]} failed: ${failed[*]}"
  exit 1
fi
echo "lint: all passed"
