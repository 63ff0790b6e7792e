"""A name is defined once: two classes of one name in two sources of one program are silently taken for one.

    definitions.py FOLDER…       every C++ source and header below; 1 when a name has two definitions

Looks at classes, unions, enumerations and inline functions in named namespaces, which is where the linker merges.
What stands in an unnamed namespace, or in a function, is its file's own. (-Wodr would need a second build with LTO;
gold's --detect-odr-violations sees functions of other lines only, and not a destructor that a library's template calls.)
"""
import os
import re
import sys

TOKEN = re.compile(r'''
    //[^\n]* | /\*.*?\*/                                        # comments
  | (?:u8|[uUL])?R"(?P<d>[^()\\\s]{0,16})\(.*?\)(?P=d)"         # raw strings
  | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+'      # strings, characters
  | ^[ \t]*\#(?:\\\n|[^\n])*                                    # the preprocessor's
  | (?P<number>\d[\w']*) | (?P<word>[A-Za-z_]\w*) | (?P<sign>::|[^\s\w])
''', re.X | re.S | re.M)
TYPES = {"class", "struct", "union", "enum"}


def tokens(text):
    """(token, line); strings are "" and what is no code is left out."""
    line, at = 1, 0
    for match in TOKEN.finditer(text):
        line, at = line + text.count("\n", at, match.start()), match.start()
        token = match.group()
        if match.group("word") or match.group("sign") or match.group("number"):
            yield token, line
        elif not token.startswith(("//", "/*")) and not token.lstrip().startswith("#"):
            yield '""', line


def without_angles(words):
    """Without template<…> in front; and <…> elsewhere stays."""
    while words[:2] == ["template", "<"]:
        depth = 0
        for at, word in enumerate(words):
            depth += (word == "<") - (word == ">")
            if word == ">" and depth == 0:
                words = words[at + 1:]
                break
        else:
            return words
    return words


def strip_attributes(words):
    text = " ".join(words)
    text = re.sub(r"\[ \[ .*? \] \] ?", "", text)
    text = re.sub(r"alignas \( [^()]* \) ?", "", text)
    return text.split()


def type_name(words):
    """Of the definition that these words begin, before its brace; None: it is another thing."""
    words = strip_attributes(without_angles(words))
    while words and words[0] in ("typedef", "static", "constexpr", "const", "inline"):
        words = words[1:]
    if not words or words[0] not in TYPES:
        return None
    words = [word for word in words if word not in TYPES and word != "final"]
    depth, name = 0, []
    for word in words:
        depth += (word == "<") - (word == ">")
        if word == ":" and depth == 0:
            break
        name.append(word)
    text = "".join(name)
    return text if "(" not in text and text else None


def inline_function(words):
    """Its name and parameters, where the words before a brace define one that the linker merges."""
    template = words[:1] == ["template"]
    words = strip_attributes(without_angles(words))
    if not (template or "inline" in words or "constexpr" in words) or "=" in words or "(" not in words:
        return None
    if "static" in words or "requires" in words:
        return None
    open_at = words.index("(")
    depth = 0
    for at in range(open_at, len(words)):
        depth += (words[at] == "(") - (words[at] == ")")
        if depth == 0:
            break
    before = words[:open_at]
    name = before[-1]
    if "operator" in before:
        name = "".join(before[before.index("operator"):])
    elif "::" in before[-2:]:
        return None  # a member: its class is looked at
    # The types alone: names of parameters may differ.
    parameters = []
    for parameter in re.split(r" , (?![^<]*>)", " ".join(words[open_at + 1:at])):
        parts = parameter.split(" = ")[0].split()
        if len(parts) > 1 and re.match(r"[A-Za-z_]", parts[-1]) and parts[-2] not in ("::", "const", "unsigned"):
            parts = parts[:-1]
        parameters.append("".join(parts))
    return f"{name}({', '.join(parameters)}){' (a template)' if template else ''}"


def definitions(text):
    """(qualified name, line) of what is defined in named namespaces."""
    stack, words, line_of = [], [], []
    paren = 0
    for token, line in tokens(text):
        if token in "()":
            paren += 1 if token == "(" else -1
        if token == "{" and not paren:
            named = all(kind == "namespace" and name for kind, name in stack)
            kind, name = "other", None
            plain = [word for word in words if word != "inline"]
            if plain[:1] == ["namespace"]:
                kind, name = "namespace", "".join(plain[1:])
            elif (found := type_name(words)) is not None:
                kind = "type"
                if named:
                    yield "::".join([*(where for _, where in stack), found]), line_of[0]
            elif named and (found := inline_function(words)) is not None:
                yield "::".join([*(where for _, where in stack), found]), line_of[0]
            stack.append((kind, name))
            words, line_of = [], []
        elif token == "{":
            stack.append(("paren", paren))
            paren = 0
        elif token == "}":
            if stack and stack[-1][0] == "paren":
                paren = stack.pop()[1]
                continue
            if stack:
                stack.pop()
            words, line_of = [], []
        elif token == ";" and not paren:
            words, line_of = [], []
        else:
            words.append(token)
            line_of.append(line)


def sources(folders):
    for folder in folders:
        for where, folders_below, names in os.walk(folder):
            folders_below[:] = sorted(name for name in folders_below if not name.startswith((".", "build")))
            for name in sorted(names):
                if name.endswith((".h", ".cc", ".cu", ".cuh")):
                    yield os.path.join(where, name)


def main(folders):
    places, files = {}, 0
    for path in sources(folders):
        files += 1
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for name, line in definitions(text):
            places.setdefault(name, []).append((path, line))
    twice = {name: where for name, where in places.items() if len({path for path, _ in where}) > 1}
    for name, where in sorted(twice.items()):
        print(f"{name} is defined {len(where)} times; name one of them otherwise, or give it an unnamed namespace:")
        for path, line in where:
            print(f"  {path}:{line}")
    print(f"{files} sources, {len(places)} definitions, {len(twice)} names twice")
    return 1 if twice or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
