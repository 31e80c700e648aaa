"""Row locks, on databases that have them, and inserts that do not fail when transactions race.

The following rows guard data. Locks are taken in this order, to avoid deadlocks. A transaction in a deadlock is retried
(`server.web.routes`).

0. the row of the current signing key (`server.identity.signing_keys`): shared for signing, exclusive for key rotation
1. a cohort's row guards its members, its rounds and their updates
2. a device's row guards its users and its leases; a transaction that grants or updates a lease writes this row first
3. a machine's row guards the assignment of tasks to its workers
4. a program's row guards its state and the jobs that wait for it; a task's row, which guards who runs the task, is
   locked right after the row of its subject: a program, a conversion, or a round's cohort
5. a job's row guards the job, the numbers of its events, and its leases: a lease changes only with its job locked
6. an adapter's row guards its versions, its tags and `main`
7. a masked round's row guards its phase and the messages of its devices

A statement that waits for a lock sees the locked row as the previous transaction left it, but all other data, such as
the result of an EXISTS, as of the start of the statement. Read data that depends on a lock in a later statement.

SQLite has a single lock, which a writing transaction takes when it begins.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from server.database.columns import Table

Found = TypeVar("Found", bound=Select[*tuple[Any, ...]])


def locked(statement: Found, *, of: Any = None, skip: bool = False) -> Found:
    """Returns `statement` with row locks until the end of the transaction. Rows are read after they are locked.

    of: tables whose rows are locked; None: all. skip: skips rows that are locked by others instead of waiting.
    Other transactions can still insert foreign keys to a locked row.
    """
    locking: Found = statement.with_for_update(of=of, skip_locked=skip, key_share=True)
    return locking.execution_options(populate_existing=True)


def add_if_absent(session: Session, table: type[Table], **values: Any) -> None:
    """Adds a row to `table` unless one of its keys is taken. Waits for a concurrent transaction with the same key."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    session.execute(insert(table).values(**values).on_conflict_do_nothing())
