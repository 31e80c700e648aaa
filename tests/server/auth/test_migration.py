"""What a home from before tenants and scopes holds after the migration: nobody gains, nobody is shut out."""

from alembic import command
from alembic.config import Config
from sqlalchemy import inspect, text

from server.auth.models import Tenant, Token
from server.auth.service import TokenService
from server.db.database import Database
from server.db.schema import upgrade
from server.identity import token_digest
from shared.access import Scope, default_scopes

OLD = {
    "operator": ("default", "mobizo-operator-" + "o" * 43),
    "app": ("acme", "mobizo-app-" + "a" * 43),
    "device": ("acme", "mobizo-device-" + "d" * 43),
}


def test_older_tokens_go_on_and_their_tenants_are_tenants(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite3'}")
    config = Config()
    config.set_main_option("script_location", "server:migrations")

    def migrate(way, revision):
        with database.engine.execution_options(writes=True).begin() as connection:
            config.attributes["connection"] = connection
            way(config, revision)

    migrate(command.upgrade, "0002")
    made = "'2026-01-01 00:00:00.000000'"
    with database.engine.execution_options(writes=True).begin() as connection:
        connection.execute(
            text(
                "INSERT INTO devices (id, tenant, name, public_key, platform, created_at) "
                f"VALUES ('device_1', 'only-devices', 'phone', 'k', 'linux', {made})"
            )
        )
        for role, (tenant, token) in OLD.items():
            connection.execute(
                text(
                    "INSERT INTO tokens (id, digest, role, tenant, name, device_id, created_at) "
                    f"VALUES (:role, :digest, :role, :tenant, '', :device, {made})"
                ),
                {
                    "role": role,
                    "digest": token_digest(token),
                    "tenant": tenant,
                    "device": "device_1" if role == "device" else None,
                },
            )
    upgrade(database.engine)
    with database.reading() as session:
        assert {name for (name,) in session.query(Tenant.name)} == {"default", "acme", "only-devices"}
        for role, (tenant, token) in OLD.items():
            principal = TokenService(session).principal(token)
            assert (principal.role, principal.tenant, principal.expires_at) == (role, tenant, None)
            # What came later is for tokens that are made later, and for those who might do everything.
            newer = {Scope.ADAPTERS_WRITE, Scope.ADAPTERS_SCORE, Scope.COHORTS_READ, Scope.COHORTS_WRITE}
            later = newer if role == "app" else set()
            assert principal.scopes == default_scopes(principal.role, tenant) - later
    migrate(command.downgrade, "0002")
    assert "tenants" not in inspect(database.engine).get_table_names()
    with database.reading() as session:
        assert session.query(Token.digest).count() == len(OLD)
    database.close()
