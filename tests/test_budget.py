"""The budget of lines, their form, and which module may import which."""
import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = ["kernels", "shift", "model", "serve", "bench"]          # each imports from its left only
PRESENT = [name for name in MODULES if (ROOT / f"{name}.py").exists()]
MECHANISM = {"torch", "tiktoken", "safetensors", "huggingface_hub", "jinja2"}
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENCODING, tokenize.ENDMARKER}


def source(name):
    return (ROOT / name).read_text(encoding="utf-8")


def docstring_lines(tree):
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(text):
    """Numbers of the lines that count: no blank ones, comments, docstrings; other strings do."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    blank = {i for i, line in enumerate(text.splitlines(), 1) if not line.strip()}
    return lines - docstring_lines(ast.parse(text)) - blank


def crowded_lines(text):
    """The lines on which more than one statement starts, a body behind its colon included."""
    starts = [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sorted({line for line in starts if starts.count(line) > 1})


def imports(text):
    """The top-level names of all imports, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "flat modules: no relative imports"
            names.add(node.module.split(".")[0])
    return names


SAMPLE = '''"""A docstring
of two lines."""
import os                  # code

# a comment
def f():
    """A docstring."""
    text = """a string

that counts"""
    return (text,
            1)   # code
'''


def test_the_counting_itself():
    """What counts and what does not, on a sample; two statements on a line, in both forms."""
    assert code_lines(SAMPLE) == {3, 6, 8, 10, 11, 12}
    assert crowded_lines(SAMPLE) == []
    assert crowded_lines("a = 1; b = 2\nif a: b = 3\nc = ';'\nfor x in a:\n    pass\n") == [1, 2]
    assert imports("import a.b\ndef f():\n    from c.d import e\n") == {"a", "c"}


def test_budget_of_lines():
    """2,000 lines of Python in kernels, shift, model and serve together, and 500 more in bench."""
    counts = {name: len(code_lines(source(f"{name}.py"))) for name in PRESENT}
    print(counts)
    assert counts["kernels"] > 20 and counts["shift"] > 100 and counts["model"] > 100
    assert sum(count for name, count in counts.items() if name != "bench") <= 2000, counts
    assert counts.get("bench", 0) <= 500


@pytest.mark.skipif(not (ROOT / "kernels.c").exists(), reason="kernels.c is not here yet")
def test_budget_of_c():
    """350 lines of C, comments and blank lines apart."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source("kernels.c"), flags=re.S)
    lines = [line for line in text.splitlines() if re.sub(r"//.*", "", line).strip()]
    assert 0 < len(lines) <= 350
    assert max(len(line) for line in source("kernels.c").splitlines()) <= 100


@pytest.mark.parametrize("file", [f"{name}.py" for name in PRESENT] + ["assets/tour.py"] + sorted(
    str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("*.py")))
def test_lines_are_short_and_hold_one_statement(file):
    """At most 100 columns, one statement a line, no tabs and no trailing blanks."""
    for number, line in enumerate(source(file).splitlines(), 1):
        assert line == line.rstrip() and "\t" not in line, f"{file}:{number}"
    long = [i for i, line in enumerate(source(file).splitlines(), 1) if len(line) > 100]
    assert not long, f"{file}: more than 100 columns on lines {long}"
    crowded = crowded_lines(source(file))
    assert not crowded, f"{file}: more than one statement on lines {crowded}"


@pytest.mark.parametrize("name", PRESENT)
def test_each_module_imports_only_from_its_left(name):
    """kernels <- shift <- model <- serve <- bench; the mechanism needs few packages."""
    found, left = imports(source(f"{name}.py")), set(MODULES[:MODULES.index(name)])
    assert not found & (set(MODULES) - left), f"{name} imports from its right, or itself"
    own = {"triton"} if name == "kernels" else set()         # torch for CUDA brings it
    if name in ("kernels", "shift", "model"):
        assert found <= left | own | MECHANISM | set(sys.stdlib_module_names), found


def test_each_module_opens_with_what_it_is():
    """The docstring says what the file does, what it does not know, and a command that runs it."""
    for name in PRESENT:
        text = ast.get_docstring(ast.parse(source(f"{name}.py")))
        assert text.startswith(f"{name}.py: ") and "does not know" in text, name
        assert re.search(r"^    (pytest|python|torchrun) ", text, re.M), f"{name}: no command"
