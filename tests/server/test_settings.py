"""Settings and their way into child processes."""

import json

import pytest
from pydantic import ValidationError
from sqlalchemy import make_url

from server.settings import Settings
from shared.errors import BadRequest


def test_a_child_has_the_same_settings(tmp_path, monkeypatch):
    settings = Settings(
        home=tmp_path, port=1234, lease_seconds=7.5, compiler_command=["a b", "-c", 'print("x")'], host="::1"
    )
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings


def test_places_follow_the_home(tmp_path):
    settings = Settings(home=tmp_path)
    assert settings.url == f"sqlite:///{tmp_path}/mobizo.sqlite3"
    assert settings.key_path.is_relative_to(tmp_path)
    assert Settings(home=tmp_path, database_url="sqlite:////elsewhere").url == "sqlite:////elsewhere"


@pytest.mark.parametrize("changes", [{"port": -1}, {"lease_seconds": 0}, {"compile_attempts": 0}, {"port": "x"}])
def test_what_cannot_be(tmp_path, changes):
    with pytest.raises(ValidationError):
        Settings(home=tmp_path, **changes)


def test_a_database_password_apart_from_its_url(tmp_path, monkeypatch):
    monkeypatch.setenv("MOBIZO_DATABASE_URL", "postgresql+psycopg://mobizo@db.example:5432/mobizo?sslmode=require")
    (tmp_path / "password").write_text("p@ss/w:rd%\n")
    monkeypatch.setenv("MOBIZO_DATABASE_PASSWORD_FILE", str(tmp_path / "password"))
    settings = Settings(home=tmp_path)
    url = make_url(settings.url)
    assert (url.username, url.password, url.host, url.query) == (
        "mobizo",
        "p@ss/w:rd%",
        "db.example",
        {"sslmode": "require"},
    )
    assert "p@ss" not in repr(settings)
    assert "p@ss" not in str(settings.model_dump())
    monkeypatch.setenv("MOBIZO_DATABASE_URL", "postgresql+psycopg://db.example/mobizo")
    with pytest.raises(BadRequest, match="USER@HOST"):
        Settings(home=tmp_path).url  # noqa: B018


def test_settings_in_files(tmp_path, monkeypatch):
    (tmp_path / "port").write_text("1234\n")
    monkeypatch.setenv("MOBIZO_PORT_FILE", str(tmp_path / "port"))
    assert Settings(home=tmp_path).port == 1234
    monkeypatch.setenv("MOBIZO_PORT", "4321")
    assert Settings(home=tmp_path).port == 4321
    assert Settings(home=tmp_path, port=1).port == 1
    monkeypatch.setenv("MOBIZO_HOST_FILE", str(tmp_path / "nothing"))
    with pytest.raises(BadRequest, match="MOBIZO_HOST_FILE"):
        Settings(home=tmp_path)


def test_reference_texts_are_lists_by_the_bases_name(tmp_path, monkeypatch):
    texts = {"tiny": ["Der Mond dreht sich um die Erde."]}
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    monkeypatch.setenv("MOBIZO_REFERENCE_TEXTS_FILE", str(tmp_path / "texts.json"))
    settings = Settings(home=tmp_path)
    assert settings.reference_texts == {"tiny": ("Der Mond dreht sich um die Erde.",)}
    monkeypatch.delenv("MOBIZO_REFERENCE_TEXTS_FILE")
    monkeypatch.setenv("MOBIZO_REFERENCE_TEXTS", settings.environment()["MOBIZO_REFERENCE_TEXTS"])
    assert Settings(home=tmp_path) == settings
    for wrong in ([], {"tiny": []}, {"tiny": [""]}, {"tiny": ["x"] * 101}, {"tiny": ["x" * 1_001]}):
        with pytest.raises(ValidationError):
            Settings(home=tmp_path, reference_texts=wrong)
    (tmp_path / "texts.json").write_text("no JSON")
    monkeypatch.setenv("MOBIZO_REFERENCE_TEXTS_FILE", str(tmp_path / "texts.json"))
    with pytest.raises(BadRequest, match="MOBIZO_REFERENCE_TEXTS_FILE"):
        Settings(home=tmp_path)


def test_every_setting_is_described():
    assert all(field.description for field in Settings.model_fields.values())
