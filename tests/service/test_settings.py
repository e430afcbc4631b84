"""Settings from the command line and from environment variables."""

import json

import pytest

from service.serve_command import parse
from service.settings import Settings, from_command_line


def test_escapes_of_json_are_read_in_options_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    aliases = ["\u03b1 \u03b2", 'quoted "name"', "back\\slash"]
    served = json.dumps([{"path": "/model", "aliases": aliases}])
    option = from_command_line([f"--models.served={served}"])
    monkeypatch.setenv("VITRINE_MODELS__SERVED", served)
    for settings in (option, from_command_line([])):
        assert [*settings.models.served[0].aliases] == aliases


def test_names_in_a_list_may_be_divided_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRINE_DEBUG__HOSTS", "a, b")
    for options in (["--server.hosts", "a,b"], ["--server.hosts=a", "--server.hosts=b"]):
        settings = from_command_line(options)
        assert settings.server.hosts == settings.debug.hosts == ("a", "b")
    for value in ("[::1]", "[2001:DB8::1]:80, a", '["[::1]"]'):
        (first, *_) = from_command_line(["--server.hosts", value]).server.hosts
        assert first in ("[::1]", "[2001:db8::1]:80")


@pytest.mark.parametrize("arguments", [["--model.path", "/option"], ["/option"]])
def test_options_and_the_model_override_the_environment(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("VITRINE_MODEL__PATH", "/variable")
    monkeypatch.setenv("VITRINE_SERVER__PORT", "81")
    settings, _ = parse(arguments)
    assert (str(settings.model.path), settings.server.port) == ("/option", 81)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VITRINE_MODEL_PATH", "x", "not a setting; did you mean VITRINE_MODEL__PATH?"),
        ("VITRINE_OTHER__NAME", "x", "VITRINE_OTHER__NAME is not a setting; vitrine-serve --help"),
        ("VITRINE_MODEL", "x", "not a setting; those of its group are VITRINE_MODEL__NAME"),
        ("VITRINE_AUTH__KEYS", "[{", "auth.keys\n.* invalid JSON"),
    ],
)
def test_invalid_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        from_command_line([])


def test_folder_and_list_of_models_are_mutually_exclusive() -> None:
    settings = Settings(models={"folder": "/models", "served": [{"path": "/model"}]})
    with pytest.raises(ValueError, match=r"models.served are mutually exclusive"):
        settings.model_specs()
