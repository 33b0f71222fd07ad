#!/usr/bin/env python3
"""Checks that keep the house in order. `make house` runs all of them.

layers   modules of a crate depend on those that stand above them in layers.txt, and on nothing else
sizes    how many lines of production code and of tests there are, and whether a budget is exceeded
links    links of documents to files of this repository lead somewhere
unused   dependencies that no file of their crate names
subjects subjects of commits on this branch

A check prints one line for each finding, and ends with 1 if there is one.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYERS = pathlib.Path(__file__).resolve().parent / "layers.txt"
# What generated code names.
GENERATED = {"tonic-prost", "prost", "tonic", "prost-types"}
BUDGETS = pathlib.Path(__file__).resolve().parent / "budgets.txt"


def crates(root):
    """The crates of the workspace, by name: (name, directory)."""
    for manifest in sorted([*root.glob("services/*/Cargo.toml"), *root.glob("shared/*/Cargo.toml")]):
        yield manifest.parent.name, manifest.parent


def code(text):
    """A file without comments, texts and the modules that only tests have."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'r(#*)".*?"\1', '""', text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text, flags=re.S)
    return re.sub(r"#\[cfg\(test\)\]\s*(?:use[^;]*;|mod \w+\s*;|(?:pub(?:\([^)]*\))? )?mod \w+ \{.*?\n\}\n)", "", text, flags=re.S)


def is_test(path, source):
    """Whether a file of a crate's sources is compiled for tests alone."""
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
    """The paths below `crate::` that a file names, with those in braces."""
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
    """Which module of a crate names which other one, and in which file first."""
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


def read_layers(path):
    """Per crate: its modules from the top to the bottom, and edges against that order."""
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
    """Writes an order for each crate with few edges against it: the start of layers.txt."""
    for name, directory in crates(root):
        modules, found = edges(directory)
        if len(modules) < 2:
            continue
        rest, order = set(modules), []
        while rest:
            uses = {module: {high for low, high in found if low == module and high in rest} for module in rest}
            used = {module: {low for low, high in found if high == module and low in rest} for module in rest}
            free = sorted(module for module in rest if not used[module])
            # Where there is a circle, begin with what uses most and is used least.
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
    """Lines of production code and of tests: of each service and shared, and of all."""
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


def check_links(root):
    problems = []
    for path in [*root.glob("*.md"), *root.glob("docs/**/*.md")]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file = target.split("#")[0]
            if file and not re.match(r"\w+:", file) and not (path.parent / file).exists():
                problems.append(f"{path.relative_to(root)}: {target} leads nowhere")
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
    "sizes": check_sizes,
    "links": check_links,
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
