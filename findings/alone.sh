# Sourced by each script: installs packages in a temporary folder and runs the Python on standard input with nothing else
# installed to be seen. That sets `seen` and `expected`; they are printed, and where they differ the script ends with 1.
alone() {
  local folder
  folder=$(mktemp -d)
  trap "rm -rf '$folder'" EXIT
  python3 -m pip install --quiet --no-compile --target "$folder" "$@" 2> /dev/null
  echo "$*"
  {
    printf 'import sys; sys.path.insert(0, %s)\n' "'$folder'"
    cat
    cat << 'END'
for name, value in seen.items():
    print(f"  {name}: {value!r}" + ("" if value == expected[name] else f"   CHANGED, it was {expected[name]!r}"))
sys.exit(seen != expected)
END
  } | timeout 1800 python3 -I -S -
}
