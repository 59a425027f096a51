"""A column's version changes when what its resolver does changes, and only then."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import linecache
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rowmill import steps
from rowmill.columns import column, column_spec, column_version
from rowmill.versions import code_version

_numbers = itertools.count()


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Make a module of a text, as author code is: from a file of its own."""

    def from_text(text: str) -> ModuleType:
        name = f"authored_{next(_numbers)}"
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return from_text


Load = Callable[[str], ModuleType]


def versions(load: Load, *texts: str) -> list[str]:
    return [column_version(load(text).resolver) for text in texts]


def test_equal_code_of_two_files_has_a_version_in_each(load: Load) -> None:
    first, second, again = (load(f"LIMIT = {limit}\nresolver = lambda: LIMIT").resolver for limit in (1, 2, 1))
    assert first.__code__ == second.__code__
    assert code_version(first) != code_version(second)
    assert code_version(first) == code_version(again)


def test_the_code_of_functions_that_are_closed_over_counts_and_values_do_not() -> None:
    def scored(times: Callable[[], int], N: int) -> Callable[[], int]:  # noqa: N803 - a constant's name, which is none here
        return lambda: times() * N

    assert code_version(scored(lambda: 1, 1)) != code_version(scored(lambda: 2, 1))
    assert code_version(scored(lambda: 1, 1)) == code_version(scored(lambda: 1, 2))


def test_two_lambdas_on_one_line_differ() -> None:
    first, second, third = (lambda row: row["a"]), (lambda row: row["b"]), (lambda row: row["a"])
    assert column_version(first) != column_version(second)
    assert column_version(first) == column_version(third)


def test_lambdas_in_a_chain_of_calls_differ() -> None:
    kept: list[Any] = []

    class Chain:
        def add(self, function: Any) -> Chain:
            kept.append(function)
            return self

    (
        Chain()
        .add(lambda row: row["a"]).add(lambda row: row["b"])
        .add(
            lambda row: (
                row["a"]
                + row["b"]
            )
        )
        .add(lambda row: [lambda: 0, lambda: row["c"]]).add(lambda row: [lambda: 1, lambda: 2])
    )  # fmt: skip
    assert len({column_version(function) for function in kept}) == 5


def test_a_lambda_inside_another_is_told_from_it() -> None:
    outer: Any = lambda row: lambda row: row["x"]  # noqa: E731
    assert column_version(outer) != column_version(outer(None))


def test_comments_layout_names_annotations_and_docstrings_make_no_difference(load: Load) -> None:
    plain, dressed = versions(
        load,
        """
        def resolver(row):
            return row["a"] + 1
        """,
        '''
        from rowmill import column

        @column(stale_after="7d")
        def resolver(row: dict) -> int:
            """Add one."""
            # a comment
            return (
                row["a"]  + 1   # another
            )
        ''',
    )
    assert plain == dressed


def test_another_constant_operator_or_default_makes_a_difference(load: Load) -> None:
    texts = [
        f"def resolver(row, more={default}):\n    return row['a'] {operator} {constant}"
        for default in (1, 2)
        for operator in "+-"
        for constant in (1, 1.0)
    ]
    assert len(set(versions(load, *texts))) == 8


def test_where_a_function_stands_in_its_file_makes_no_difference(load: Load) -> None:
    body = "def resolver(row):\n    return row['a']\n"
    one, other = versions(load, body, "import os\n\n\ndef before():\n    pass\n\n\n" + body)
    assert one == other


def test_the_values_that_a_function_closes_over_count() -> None:
    def over(value: Any) -> Callable[[Any], Any]:
        return lambda row: row["a"] + value

    assert column_version(over(1)) == column_version(over(1))
    assert len({column_version(over(value)) for value in (1, 2, "1", [1], {"a": {1, 2}})}) == 5


def test_functions_that_are_closed_over_count_by_their_code() -> None:
    def wrapped(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(function)
        def inner(row: Any) -> Any:
            return function(row)

        return inner

    assert column_version(wrapped(lambda row: row["a"])) != column_version(wrapped(lambda row: row["b"]))


def test_partials_count_by_function_and_arguments() -> None:
    def scaled(row: Any, factor: int, unit: str = "s") -> Any:
        return row["a"] * factor, unit

    forms = [functools.partial(scaled, factor=2), functools.partial(scaled, factor=3), functools.partial(scaled, factor=2, unit="h"), scaled]
    assert len({column_version(form) for form in forms}) == 4
    assert column_version(functools.partial(scaled, factor=2)) == column_version(forms[0])


def test_methods_and_callable_objects_count_with_their_state() -> None:
    class Scorer:
        def __init__(self, threshold: int) -> None:
            self.threshold = threshold
            self.connection = object()

        def score(self, row: Any) -> bool:
            return bool(row["a"] > self.threshold)

        def __call__(self, row: Any) -> bool:
            return self.score(row)

    assert column_version(Scorer(1).score) == column_version(Scorer(1).score) != column_version(Scorer(2).score)
    assert column_version(Scorer(1)) == column_version(Scorer(1)) != column_version(Scorer(2))


def test_project_functions_that_it_names_count_one_level_deep(load: Load) -> None:
    text = """
        def far(row):
            return {far}

        def near(row):
            return {near}, far(row)

        def resolver(row):
            return [near(row) for _ in row]
        """
    same, near, far = versions(load, text.format(near=1, far=1), text.format(near=2, far=1), text.format(near=1, far=2))
    assert same != near
    assert same == far


def test_functions_of_an_imported_project_module_count(load: Load) -> None:
    versions_of = {}
    for constant in (1, 2):
        inner = load(f"def helper(row):\n    return {constant}")
        sys.modules["scoring_module"] = inner
        versions_of[constant] = versions(load, "import scoring_module as scoring\ndef resolver(row):\n    return scoring.helper(row)")
    assert versions_of[1] != versions_of[2]


def test_upper_case_constants_count_and_other_globals_do_not(load: Load) -> None:
    text = "LIMIT = {limit}\ncounter = {counter}\ndef resolver(row):\n    return row['a'] > LIMIT + counter"
    same, limit, counter = versions(load, text.format(limit=1, counter=1), text.format(limit=2, counter=1), text.format(limit=1, counter=2))
    assert same != limit
    assert same == counter


def test_a_tool_counts_by_id_and_version(load: Load) -> None:
    text = """
        from rowmill import HttpTool, Provider, registry
        with registry.isolated():
            provider = Provider("p", base_url="https://p.example")

            @provider.post("/find", effect="read", version="{version}", timeout={timeout})
            class Find(HttpTool[dict, dict]):
                pass

        def resolver(row, ctx):
            return ctx.call(Find, row)
        """
    same, timeout, version = versions(load, text.format(version=1, timeout=1), text.format(version=1, timeout=2), text.format(version=2, timeout=1))
    assert same == timeout
    assert same != version


def test_without_source_the_code_counts() -> None:
    def compiled(text: str) -> Any:
        scope: dict[str, Any] = {}
        exec(compile(text, "<no source>", "exec"), scope)  # noqa: S102 - what a shell does
        return scope["resolver"]

    one = "def resolver(row):\n    return row['a'] in {1, 2, 3} and (lambda: row['b'])()"
    assert column_version(compiled(one)) == column_version(compiled("\n\n" + one))
    assert column_version(compiled(one)) != column_version(compiled(one.replace("'b'", "'c'")))


def test_source_that_a_notebook_keeps_is_read() -> None:
    file = "<ipython-input-7-abc>"
    text = "resolvers = [lambda row: row['a'], lambda row: row['b'], lambda row: row['a']]  # comment\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec"), scope)  # noqa: S102 - what a notebook does
    first, second, third = (column_version(resolver) for resolver in scope["resolvers"])
    assert first == third != second


def test_a_file_that_is_edited_after_it_was_loaded_makes_no_difference(load: Load) -> None:
    module = load("def resolver(row):\n    return 1\n")
    before = column_version(module.resolver)
    assert module.__file__ is not None
    Path(module.__file__).write_text("# shifted\n\ndef resolver(row):\n    return 2\n")
    linecache.clearcache()
    assert column_version(module.resolver) == before


def test_the_version_is_the_same_in_every_process(load: Load) -> None:
    module = load(
        """
        NAMES = frozenset({'a', 'b', 'c', 'd'})

        def make():
            kept = {'x', 'y', 'z'}
            return lambda row: row['a'] in NAMES | kept

        resolver = make()
        """
    )
    assert module.__file__ is not None
    script = f"import {module.__name__} as module; from rowmill.columns import column_version; print(column_version(module.resolver))"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(module.__file__).parent)}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == column_version(module.resolver)


def test_programs_count_by_every_part() -> None:
    def program(*, waterfall: bool = False, name: str = "one", constant: int = 1, condition: Any = None, other: Any = None) -> Any:
        begun = steps(continue_on_provider_unavailable=waterfall).step(name, lambda row: constant, run_if=condition, else_value=other)
        return begun.returns(lambda row: row[name])

    plain = column_version(program())
    assert plain == column_version(program())
    changed = [program(waterfall=True), program(name="two"), program(constant=2), program(condition=lambda row: row["a"]), program(other=0)]
    assert len({plain, *(column_version(one) for one in changed)}) == 6


def test_a_declared_version_wins_over_the_code_also_inside_a_program() -> None:
    one, other = column(version="1")(lambda row: 1), column(version="1")(lambda row: 2)
    assert column_spec("c", one).version == column_spec("c", other).version == "=1"
    assert column_spec("c", one, version="2").version == "=2"
    ends = lambda row: row["s"]  # noqa: E731
    assert column_version(steps().step("s", one).returns(ends)) == column_version(steps().step("s", other).returns(ends))


def test_run_if_and_else_value_count() -> None:
    resolver = lambda row: 1  # noqa: E731
    specs = [
        column_spec("c", resolver),
        column_spec("c", resolver, run_if=lambda row: row["a"]),
        column_spec("c", resolver, run_if=lambda row: row["b"]),
        column_spec("c", resolver, run_if=lambda row: row["b"], else_value=0),
    ]
    assert len({spec.version for spec in specs}) == 4
