# bash completion of ptc and ptcfs: the programs themselves say what may come next.
_ptc() {
  local current=${COMP_WORDS[COMP_CWORD]} kind line lines
  mapfile -t lines < <("$1" --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  kind=${lines[0]-words}
  [[ $current == '=' ]] && current=''
  COMPREPLY=()
  for line in "${lines[@]:1}"; do
    COMPREPLY+=("${line%%$'\t'*}")
  done
  case $kind in
    files) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current") ;;
    directories) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$current") ;;
  esac
  # Only inside a completion that bash itself began does compopt mean anything.
  [[ $kind == words ]] || compopt -o filenames 2>/dev/null
  [[ ${COMPREPLY[0]-} != *= ]] || compopt -o nospace 2>/dev/null
}
complete -F _ptc ptc ptcfs
