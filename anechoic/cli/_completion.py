"""Scripts with which a shell completes the commands of `anechoic` and their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BASH = """_anechoic() {{
    local key="${{COMP_WORDS[1]}}" words
    COMPREPLY=()
    if [[ $COMP_CWORD -ge 3 && $key == tools ]]; then key="tools ${{COMP_WORDS[2]}}"; fi
    if [[ $COMP_CWORD -eq 1 ]]; then words="{first}"
    elif [[ $COMP_CWORD -eq 2 && $key == tools ]]; then words="{tools}"
    else case "$key" in
{cases}
    esac; fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _anechoic anechoic"""
# zsh runs the function of bash.
ZSH = "autoload -U +X bashcompinit && bashcompinit\n" + BASH
FISH_FIRST = "complete -c anechoic -n __fish_use_subcommand -f -a '{first}'"
FISH_TOOLS = "complete -c anechoic -n '__fish_seen_subcommand_from tools' -a '{tools}'"
FISH_COMMAND = "complete -c anechoic -n '__fish_seen_subcommand_from {last}' -a '{words}'"
SHELLS = ("bash", "zsh", "fish")


def script(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """Return the script of a shell. words: of every command, its options and the names it takes."""
    tools = " ".join(name.split()[1] for name in words if name.startswith("tools "))
    first = " ".join([*(name for name in words if " " not in name), "tools", "--help", "--version", "--completion"])
    if shell == "fish":
        commands = [FISH_COMMAND.format(last=name.split()[-1], words=" ".join(words[name])) for name in words]
        return "\n".join([FISH_FIRST.format(first=first), FISH_TOOLS.format(tools=tools), *commands])
    cases = "\n".join(f'        "{name}") words="{" ".join(options)}";;' for name, options in words.items())
    return (BASH if shell == "bash" else ZSH).format(first=first, tools=tools, cases=cases)
