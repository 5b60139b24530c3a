"""Writes a Bazel workspace that needs no network: genrules, Starlark rules, directory outputs, big outputs and tests."""

import pathlib

PACKAGES = 20
GENRULES = 8
# In each package: the genrules, one Starlark action with a file, one with a directory.
SMALL_ACTIONS = PACKAGES * (GENRULES + 2)
# Outputs of 20 MB, half of them text, half of them bytes that no compressor shrinks.
BIG_ACTIONS = 6
BIG_LEN = 20_000_000
# An `sh_test` and a Starlark test.
TESTS = 2
ACTIONS = SMALL_ACTIONS + BIG_ACTIONS + TESTS

# `sh_test` of Bazel 4 loads these repositories even if nothing is built from them; offline they are local stand-ins.
STUBS = {
    "rules_cc": ("cc", ["cc_binary", "cc_library", "cc_test", "cc_toolchain", "cc_toolchain_suite", "cc_proto_library"]),
    "rules_java": ("java", ["java_binary", "java_import", "java_library", "java_runtime", "java_toolchain"]),
    "rules_proto": ("proto", ["proto_lang_toolchain", "proto_library"]),
    "remote_coverage_tools": ("", []),
}
COVERAGE_BUILD = 'filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])\n'

DEFS = """\
def _joined(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".joined")
    paths = " ".join([f.path for f in ctx.files.srcs])
    ctx.actions.run_shell(
        inputs = ctx.files.srcs,
        outputs = [out],
        mnemonic = "Join",
        command = "cat %s > %s && echo joined >&2" % (paths, out.path),
    )
    return [DefaultInfo(files = depset([out]))]

joined = rule(implementation = _joined, attrs = {"srcs": attr.label_list(allow_files = True)})

def _forest(ctx):
    out = ctx.actions.declare_directory(ctx.label.name + ".dir")
    paths = " ".join([f.path for f in ctx.files.srcs])
    ctx.actions.run_shell(
        inputs = ctx.files.srcs,
        outputs = [out],
        mnemonic = "Forest",
        command = "for d in a a/b c; do mkdir -p %s/$d && cp %s %s/$d/; done; : > %s/empty" %
                  (out.path, paths, out.path, out.path),
    )
    return [DefaultInfo(files = depset([out]))]

forest = rule(implementation = _forest, attrs = {"srcs": attr.label_list(allow_files = True)})

def _checked_test(ctx):
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(script, "#!/bin/sh\\ntest -s " + ctx.file.src.short_path + "\\n", is_executable = True)
    return [DefaultInfo(executable = script, runfiles = ctx.runfiles([ctx.file.src]))]

checked_test = rule(
    implementation = _checked_test,
    attrs = {"src": attr.label(allow_single_file = True)},
    test = True,
)
"""


def write_outputs(root: pathlib.Path, count: int, length: int) -> None:
    """Lays a workspace of `count` actions that need nothing, each with an output of `length` bytes of its own."""
    _write_base(root)
    rules = []
    for number in range(count):
        command = f"perl -e 'srand({number}); print pack(q(L*), map {{ int rand 4294967296 }} 1 .. {length // 4})' > $@"
        rules.append(f'genrule(name = "out{number}", outs = ["out{number}.bin"], cmd = """{command}""")')
    (root / "BUILD").write_text("\n".join(rules) + "\n")


def write(root: pathlib.Path) -> None:
    """Lays the workspace under `root`, a new directory."""
    _write_base(root)
    (root / "defs.bzl").write_text(DEFS)
    (root / "BUILD").write_text(_root_build())
    (root / "check.sh").write_text("#!/bin/sh\nset -e\ntest -s p0/g0_0.txt\necho all is well\n")
    (root / "check.sh").chmod(0o755)
    for package in range(PACKAGES):
        directory = root / f"p{package}"
        directory.mkdir()
        (directory / "BUILD").write_text(_package_build(package))
        (directory / "seed.txt").write_text(f"package {package}\n" * (package + 1))


def _write_base(root: pathlib.Path) -> None:
    root.mkdir(parents=True)
    workspace = ['workspace(name = "ringcas_check")']
    for name, (package, rules) in STUBS.items():
        stub = root / "stubs" / name
        (stub / package).mkdir(parents=True)
        (stub / "WORKSPACE").write_text(f'workspace(name = "{name}")\n')
        (stub / "BUILD").write_text(COVERAGE_BUILD)
        if rules:
            (stub / package / "BUILD").write_text("")
            (stub / package / "defs.bzl").write_text("".join(f"{rule} = native.{rule}\n" for rule in rules))
        workspace.append(f'local_repository(name = "{name}", path = "stubs/{name}")')
    (root / "WORKSPACE").write_text("\n".join(workspace) + "\n")
    (root / ".bazelignore").write_text("stubs\n")


def _root_build() -> str:
    rules = [
        'load("//:defs.bzl", "checked_test")',
        'sh_test(name = "shell_test", size = "small", srcs = ["check.sh"], data = ["//p0:g0_0.txt"])',
        'checked_test(name = "starlark_test", size = "small", src = "//p1:g1_0.txt")',
    ]
    for number in range(BIG_ACTIONS):
        if number % 2 == 0:
            command = f"perl -e 'printf(q(%019d%s), $$_ * {7 + number}, chr 10) for 1 .. {BIG_LEN // 20}' > $@"
        else:
            command = (
                f"perl -e 'srand({number}); print pack(q(L*), map {{ int rand 4294967296 }} 1 .. 1000) for 1 .. "
                f"{BIG_LEN // 4000}' > $@"
            )
        rules.append(f'genrule(name = "big{number}", outs = ["big{number}.bin"], cmd = """{command}""")')
    return "\n".join(rules) + "\n"


def _package_build(package: int) -> str:
    names = [f"g{package}_{number}" for number in range(GENRULES)]
    outs = ", ".join(f'":{name}"' for name in names)
    rules = ['load("//:defs.bzl", "forest", "joined")', 'package(default_visibility = ["//visibility:public"])']
    for number, name in enumerate(names):
        # Each output has its own content and a length from a few bytes to some hundred KiB; one of them is empty.
        lines = 0 if (package, number) == (3, 3) else 1 + (package * GENRULES + number) ** 2
        command = f"cat $< > $@; seq {package + number} {package + number + lines} >> $@" if lines else ": > $@"
        rules.append(f'genrule(name = "{name}", srcs = ["seed.txt"], outs = ["{name}.txt"], cmd = "{command}")')
    rules.append(f'joined(name = "j{package}", srcs = [{outs}])')
    rules.append(f'forest(name = "f{package}", srcs = [{outs}])')
    return "\n".join(rules) + "\n"
