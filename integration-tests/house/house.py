#!/usr/bin/env python3
"""Structural checks of the repository. `make house` runs all of them.

layers   modules of a crate depend on those that stand below them in layers.txt, and on nothing else
circles  modules of one folder do not depend on each other in a circle
words    words that the style rules out: no more of each than limits.txt says
width    comments wider than 100 columns: no more than limits.txt says
sizes    how many lines of production code and of tests there are, and whether a budget is exceeded
links    links of documents to files and headings of this repository lead somewhere
settings docs/operations/settings.md lists every setting of the services, and no other
attacks  docs/security.md names tests that exist
unused   dependencies that no file of their crate names
subjects subjects of commits on this branch

Each finding is one line of output. The exit code is 1 if there is a finding.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYERS = pathlib.Path(__file__).resolve().parent / "layers.txt"
# Dependencies of generated code.
GENERATED = {"tonic-prost", "prost", "tonic", "prost-types"}
LIMITS = pathlib.Path(__file__).resolve().parent / "limits.txt"
BUDGETS = pathlib.Path(__file__).resolve().parent / "budgets.txt"


def crates(root):
    """The crates of the workspace, by name: (name, directory)."""
    for manifest in sorted([*root.glob("services/*/Cargo.toml"), *root.glob("shared/*/Cargo.toml")]):
        yield manifest.parent.name, manifest.parent


def code(text):
    """Returns a file without comments, string contents and test modules."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'r(#*)".*?"\1', '""', text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text, flags=re.S)
    return re.sub(r"#\[cfg\(test\)\]\s*(?:use[^;]*;|mod \w+\s*;|(?:pub(?:\([^)]*\))? )?mod \w+ \{.*?\n\}\n)", "", text, flags=re.S)


def is_test(path, source):
    """Returns whether a source file of a crate is compiled only for tests."""
    relative = path.relative_to(source)
    names = [*relative.parts[:-1], relative.stem]
    for depth, name in enumerate(names):
        parent = source.joinpath(*names[:depth])
        owners = [parent / "mod.rs", parent.with_suffix(".rs")] if depth else [source / "lib.rs", source / "main.rs"]
        for owner in owners:
            if owner.exists() and re.search(rf"#\[cfg\(test\)\]\s*(?:pub(?:\([^)]*\))? )?mod {name}\s*;", owner.read_text()):
                return True
    return False


def paths(text):
    """Returns the paths below `crate::` that a file uses, including those in braces."""
    for match in re.finditer(r"\bcrate::(\w+|\{)", text):
        if match.group(1) != "{":
            yield match.group(1)
            continue
        depth, part = 1, ""
        for character in text[match.end():]:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                break
            if depth == 1:
                part += character
        yield from re.findall(r"(?:^|,)\s*(\w+)", part)


def edges(directory):
    """Returns the dependencies between the modules of a crate, each with the first file."""
    source = directory / "src"
    entry = next((source / name for name in ("lib.rs", "main.rs") if (source / name).exists()), None)
    if entry is None:
        return {}, {}
    modules = set(re.findall(r"^(?:pub(?:\([^)]*\))? )?mod (\w+)\s*;", code(entry.read_text()), flags=re.M))
    exported = {}
    for module, names in re.findall(r"^pub(?:\([^)]*\))? use (\w+)::(\{[^}]*\}|\w+)", code(entry.read_text()), flags=re.M):
        exported.update({name: module for name in re.findall(r"\w+", names)})
    found = {}
    for path in sorted(source.rglob("*.rs")):
        relative = path.relative_to(source)
        module = relative.parts[0].removesuffix(".rs")
        if module not in modules or is_test(path, source):
            continue
        for name in paths(code(path.read_text())):
            name = exported.get(name, name)
            if name in modules and name != module:
                found.setdefault((module, name), str(relative))
    return modules, found


def sibling_edges(source):
    """Returns, for each source folder of a crate, the dependencies between its modules."""
    folders = {}
    for path in sorted(source.rglob("*.rs")):
        if is_test(path, source):
            continue
        parts = path.relative_to(source).with_suffix("").parts
        if parts[-1] == "mod":
            parts = parts[:-1]
        text = code(path.read_text())
        for depth in range(1, len(parts)):
            folder, module = parts[:depth], parts[depth]
            names = re.findall(rf"\bcrate::{'::'.join(folder)}::(?:\{{([^;]*?)\}};|(\w+))", text)
            up = "super::" * (len(parts) - depth)
            names += re.findall(rf"(?<![:\w]){up}(?:\{{([^;]*?)\}};|(\w+))", text)
            used = {word for braces, name in names for word in (re.findall(r"\w+", braces) if braces else [name])}
            folders.setdefault(folder, {}).setdefault(module, set()).update(used - {module})
    return folders


def check_circles(root, limits):
    problems = []
    known = {folder for folder, _ in limits.get("circle", [])}
    for name, directory in crates(root):
        for folder, uses in sibling_edges(directory / "src").items():
            rest = {module: {other for other in used if other in uses} for module, used in uses.items()}
            # A module without remaining dependencies is in no circle.
            while free := [module for module, used in rest.items() if not used & rest.keys()]:
                for module in free:
                    del rest[module]
            # A module without remaining dependents is in no circle.
            while free := [module for module in rest if not any(module in used for used in rest.values())]:
                for module in free:
                    del rest[module]
            where = f"{name} {'::'.join(folder)}"
            if rest and where not in known:
                problems.append(f"{where} has a circle of {', '.join(sorted(rest))}")
            elif where in known and not rest:
                problems.append(f"{where} has no circle any more: limits.txt need not name it")
    return problems


def texts(root):
    """Yields the prose as (file, line): documents, contracts, comments, errors, logs and help."""
    for path in [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("proto/**/*.proto"), *root.glob("proto/*.md")]:
        yield from ((path, line) for line in path.read_text().splitlines())
    for _, directory in crates(root):
        for path in directory.rglob("*.rs"):
            for line in path.read_text().splitlines():
                if re.match(r"\s*//|.*#\[error\(|.*tracing::\w+!|.*\bhelp\b", line):
                    yield path, line


def read_limits(path):
    """Returns the limits of each check, as pairs of a subject and a maximum."""
    limits = {}
    for line in path.read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            check, count, pattern = line.split(None, 2)
            limits.setdefault(check, []).append((pattern, int(count)))
    return limits


def over(what, count, most):
    return [f"{what}: there are {count}, and limits.txt allows {most}"] if count > most else []


def check_words(root, limits):
    lines = [line for _, line in texts(root)]
    problems = []
    for pattern, most in limits.get("words", []):
        problems += over(pattern, sum(len(re.findall(pattern, line, flags=re.I)) for line in lines), most)
    return problems


def check_width(root, limits):
    wide = 0
    for path in [*root.glob("proto/**/*.proto"), *(file for _, directory in crates(root) for file in directory.rglob("*.rs"))]:
        is_fenced = False
        for line in path.read_text().splitlines():
            text = re.match(r"\s*//[/!]? ?(.*)", line)
            if not text:
                is_fenced = False
                continue
            if text.group(1).startswith("```"):
                is_fenced = not is_fenced
            # Rows of tables and diagrams cannot be wrapped.
            wide += len(line) > 100 and not is_fenced and not text.group(1).startswith("|")
    return over("comments wider than 100 columns", wide, limits["width"][0][1])


def read_layers(path):
    """Returns, for each crate, its modules from top to bottom and the allowed edges against that order."""
    layers, crate = {}, None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        if line.startswith("[") and line.endswith("]"):
            crate = line[1:-1]
            layers[crate] = ([], set())
        elif crate is None:
            sys.exit(f"{path.name}:{number}: a crate in brackets comes first")
        elif "->" in line:
            layers[crate][1].add(tuple(part.strip() for part in line.split("->")))
        else:
            layers[crate][0].extend(line.split())
    return layers


def check_layers(root, layers):
    problems = []
    for name, directory in crates(root):
        modules, found = edges(directory)
        order, allowed = layers.get(name, ([], set()))
        if len(modules) < 2 and not order:
            continue
        missing, gone = sorted(modules - set(order)), sorted(set(order) - modules)
        problems += [f"{name}: layers.txt has no place for the module {module}" for module in missing]
        problems += [f"{name}: layers.txt names {module}, which is no module" for module in gone]
        place = {module: at for at, module in enumerate(order)}
        for (low, high), file in sorted(found.items()):
            if low in place and high in place and place[high] < place[low] and (low, high) not in allowed:
                problems.append(f"{name}: {low} may not use {high}, which stands above it ({file})")
        against = {edge for edge in found if place.get(edge[1], 0) < place.get(edge[0], 0)}
        problems += [
            f"{name}: layers.txt allows {low} -> {high}, which is not needed any more" for low, high in sorted(allowed - against)
        ]
    return problems


def propose(root):
    """Prints an order of modules for each crate with few edges against it, as a start for layers.txt."""
    for name, directory in crates(root):
        modules, found = edges(directory)
        if len(modules) < 2:
            continue
        rest, order = set(modules), []
        while rest:
            uses = {module: {high for low, high in found if low == module and high in rest} for module in rest}
            used = {module: {low for low, high in found if high == module and low in rest} for module in rest}
            free = sorted(module for module in rest if not used[module])
            # In a circle, the module with the most dependencies and the fewest dependents comes first.
            top = free or [max(sorted(rest), key=lambda module: len(uses[module]) - len(used[module]))]
            order += top
            rest -= set(top)
        place = {module: at for at, module in enumerate(order)}
        print(f"[{name}]")
        for start in range(0, len(order), 8):
            print(" ".join(order[start:start + 8]))
        for low, high in sorted(found):
            if place[high] < place[low]:
                print(f"{low} -> {high}")
        print()


def lines(path):
    return len(path.read_text(errors="replace").splitlines())


def sizes(root):
    """Counts the lines of production code and of tests, for each service, shared and all."""
    sums = {}
    for name, directory in [*crates(root), ("integration-tests", root / "integration-tests")]:
        kind = "shared" if directory.parent.name == "shared" else name
        sums.setdefault(kind, [0, 0])
        for path in directory.rglob("*.rs"):
            parts = path.relative_to(directory).parts
            if name == "integration-tests" or name == "testing" or parts[0] in ("tests", "testing", "benches", "examples"):
                sums[kind][1] += lines(path)
                continue
            if parts[0] == "src" and is_test(path, directory / "src"):
                sums[kind][1] += lines(path)
                continue
            text = path.read_text()
            inner = re.search(r"^#\[cfg\(test\)\]\nmod \w+ \{.*", text, flags=re.S | re.M)
            tests = len(inner.group(0).splitlines()) if inner else 0
            sums[kind][0] += len(text.splitlines()) - tests
            sums[kind][1] += tests
    return sums


def check_sizes(root):
    sums = sizes(root)
    sums["all"] = [sum(pair[0] for pair in sums.values()), sum(pair[1] for pair in sums.values())]
    budgets = {}
    for line in BUDGETS.read_text().splitlines():
        line = line.split("#")[0].split()
        if line:
            budgets[line[0]] = (int(line[1]), int(line[2]))
    problems = []
    print(f"{'':18} {'production':>10} {'tests':>8}")
    for name, (production, tests) in sums.items():
        print(f"{name:18} {production:>10} {tests:>8}")
        if name not in budgets:
            problems.append(f"{name}: budgets.txt has no line for it")
        most = budgets.get(name, (production, tests))
        for what, lines_there, budget in (("production code", production, most[0]), ("tests", tests, most[1])):
            if lines_there > budget:
                problems.append(f"{name}: {lines_there} lines of {what}, and the budget is {budget}")
    return problems


def anchors(text):
    """The anchors of the headings of a document, as GitHub and mdbook make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()))
        number = 0
        while (name := anchor if number == 0 else f"{anchor}-{number}") in found:
            number += 1
        found.add(name)
    return found


def check_links(root):
    problems = []
    for path in [*root.glob("*.md"), *root.glob("docs/**/*.md")]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if re.match(r"\w+:", file):
                continue
            destination = path.parent / file if file else path
            if not destination.exists():
                problems.append(f"{path.relative_to(root)}: {target} leads nowhere")
            elif anchor and destination.suffix == ".md" and anchor not in anchors(destination.read_text()):
                problems.append(f"{path.relative_to(root)}: {target} leads to no heading")
    return problems


def setting_flags(text):
    """The flags of a program's arguments that have a variable, too."""
    text = re.sub(r"^#\[cfg\(test\)\]\nmod \w+ \{.*", "", text, flags=re.S | re.M)
    for arguments, field in re.findall(r"#\[arg\((.*?)\)\]\s*(?:#\[[^\n]*\]\s*)*(?:pub(?:\([^)]*\))? )?(\w+):", text, flags=re.S):
        if re.search(r"\blong\b", arguments) and re.search(r"\benv\b", arguments):
            named = re.search(r'\blong\s*=\s*"([^"]+)"', arguments)
            yield named.group(1) if named else field.replace("_", "-")


def check_settings(root):
    document = root / "docs/operations/settings.md"
    rows = [line.split("|")[1] for line in document.read_text().splitlines() if line.startswith("| `--")]
    listed = {flag for row in rows for flag in re.findall(r"`--([\w-]+)`", row)}
    flags = set()
    for name, directory in crates(root):
        if name != "gantry":
            for path in (directory / "src").rglob("*.rs"):
                flags.update(setting_flags(path.read_text()))
    problems = [f"settings.md does not list --{flag}" for flag in sorted(flags - listed)]
    return problems + [f"settings.md lists --{flag}, which no service has" for flag in sorted(listed - flags)]


def check_attacks(root):
    """The last column of each table in security.md names files, test programs and tests. Tests have several underscores."""
    folders = ("services", "shared", "integration-tests")
    tests = {name for folder in folders for path in (root / folder).rglob("*.rs") for name in re.findall(r"\bfn (\w+)", path.read_text())}
    problems = []
    for line in (root / "docs/security.md").read_text().splitlines():
        if line.startswith("|"):
            for name, is_start in re.findall(r"`([a-z0-9]+(?:_[a-z0-9]+){2,})(…?)`", line.split("|")[-2]):
                if not any(test.startswith(name) if is_start else test == name for test in tests):
                    problems.append(f"security.md names {name}, which is no test")
    return problems


def check_unused(root):
    problems = []
    manifests = [*root.glob("services/*/Cargo.toml"), *root.glob("shared/*/Cargo.toml"), root / "integration-tests/Cargo.toml"]
    for manifest in manifests:
        section, names = "", []
        for line in manifest.read_text().splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif "dependencies" in section and (match := re.match(r"([\w-]+)\s*=", line)):
                names.append(match.group(1))
        text = "".join(path.read_text() for path in manifest.parent.rglob("*.rs"))
        for name in names:
            if name not in GENERATED and not re.search(rf"\b{name.replace('-', '_')}\b", text):
                problems.append(f"{manifest.relative_to(root)}: {name} is named by no file")
    return problems


def check_subjects(root):
    log = subprocess.run(["git", "-C", root, "log", "-50", "--no-merges", "--format=%h %s"], capture_output=True, text=True, check=True)
    problems = []
    for line in log.stdout.splitlines():
        commit, subject = line.split(" ", 1)
        if len(subject) > 72 or not re.match(r"[\w./-]+(?:, [\w./-]+)*: [a-z`-]", subject) or subject.endswith("."):
            problems.append(f"{commit}: {subject!r} is not `area: imperative` of at most 72 characters")
    return problems


CHECKS = {
    "layers": lambda root: check_layers(root, read_layers(LAYERS)),
    "circles": lambda root: check_circles(root, read_limits(LIMITS)),
    "words": lambda root: check_words(root, read_limits(LIMITS)),
    "width": lambda root: check_width(root, read_limits(LIMITS)),
    "sizes": check_sizes,
    "links": check_links,
    "settings": check_settings,
    "attacks": check_attacks,
    "unused": check_unused,
    "subjects": check_subjects,
}


def main():
    names = sys.argv[1:] or list(CHECKS)
    if names == ["propose"]:
        return propose(ROOT)
    problems = [f"{name}: {problem}" for name in names for problem in CHECKS[name](ROOT)]
    print("\n".join(problems) or "house: in order")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
