"""How a run's programs are found."""

import re

import pytest

from aot import programs
from aot.errors import ConfigError
from aot.programs import factory_string, load_program_set
from tests.support.toy import FACTORY, LARGE, SMALL


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The entry points that are installed, for a test to fill."""
    points: dict[str, str] = {}
    monkeypatch.setattr(programs, "registered_factories", lambda: points)
    monkeypatch.delenv("DFLASH_AOT_PROGRAMS", raising=False)
    return points


def test_the_only_registered_factory_needs_no_name(registered: dict[str, str]) -> None:
    registered["toy"] = FACTORY
    factory, found = load_program_set("toy", ("inner=32",))
    assert factory == FACTORY
    assert found.buckets == (SMALL, LARGE)
    assert found.programs[0].identity == {"network": {"hidden": 8, "inner": 32}}


def test_several_factories_need_a_name(registered: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    registered.update(a="a:f", b="b:f")
    with pytest.raises(ConfigError, match="several packages offer programs: a, b"):
        factory_string()
    assert factory_string("b") == "b:f"
    monkeypatch.setenv("DFLASH_AOT_PROGRAMS", "a")
    assert factory_string() == "a:f"
    assert factory_string("b") == "b:f"


def test_no_factory_and_an_unknown_one_are_told_apart(registered: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no installed package offers programs"):
        factory_string()
    registered["a"] = "a:f"
    with pytest.raises(ConfigError, match="no programs are registered as 'c'") as caught:
        factory_string("c")
    assert caught.value.hint == "registered: a"


def test_an_error_inside_a_factory_module_is_not_hidden(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_factory.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_program_set("toy", (), "broken_factory:f")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("os:getcwd", "takes no (run_file, overrides)"),
        ("os:sep", "takes no (run_file, overrides)"),
        ("nope:foo", "there is no module 'nope'"),
        ("os:nope", "has no function 'nope'"),
    ],
)
def test_what_is_no_factory_is_refused_with_those_that_are(
    registered: dict[str, str], factory: str, message: str
) -> None:
    """Fails, with a TypeError, without the look at the signature; without a hint for an unknown name."""
    registered["toy"] = FACTORY
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_program_set("toy", (), factory)
    assert "there are: toy" in (caught.value.hint or "")


def test_a_factory_must_make_programs(registered: dict[str, str]) -> None:
    """Fails, with an AttributeError much later, without the look at the result."""
    with pytest.raises(ConfigError, match="made no ProgramSet, but a tuple") as caught:
        load_program_set("toy", (), f"{__name__}:pair")
    assert caught.value.hint


def pair(run_file: str, overrides: tuple[str, ...]) -> tuple[object, ...]:
    return run_file, overrides
