# fish completion of ptc and ptcfs: the programs themselves say what may come next.
function __ptc_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l lines ($words[1] --complete $words[2..-1] "$current" 2>/dev/null)
    switch "$lines[1]"
        case files
            __fish_complete_path "$current"
        case directories
            __fish_complete_directories "$current"
    end
    printf '%s\n' $lines[2..-1]
end
complete -c ptc -f -a '(__ptc_complete)'
complete -c ptcfs -f -a '(__ptc_complete)'
