"""Locks on rows, where a database has them. Knows no tables.

Which row guards what, and in which order they are taken, so that two transactions wait for each other in a ring as
seldom as can be (and are tried again where they do, see `server.db.collisions`):

0. the row of the key that signs (`server.succession`): who signs holds it shared, who rotates the key alone
1. a cohort's row guards its members, its rounds and what counts in them
2. a device's row guards which leases it has; whoever gives it one, or hears of it, writes that row first
3. a machine's row guards which programs its workers compile
4. a program's row guards its state and what becomes of the jobs that wait for it
5. a job's row guards the job, its events' numbers, and its leases: no lease changes but with its job locked
6. an adapter's row guards its versions, tags and what is `main`
7. a masked round's row guards its phase and what its devices said in it

A statement that waits for a lock sees the locked row as the one before left it, but everything else, such as what an
EXISTS looks at, as it was when the statement began: what depends on a lock is read by a later statement.

SQLite has one lock, which a writing transaction takes as it begins; there all this is already so.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Select

Found = TypeVar("Found", bound=Select[*tuple[Any, ...]])


def locked(statement: Found, *, of: Any = None, skip: bool = False) -> Found:
    """`statement` with its rows locked until the transaction ends, and read as they are once they are locked.

    of: the tables whose rows are locked; None: all of them. skip: passes by rows that others hold, instead of waiting.
    Foreign keys to a locked row may still be made.
    """
    found: Found = statement.with_for_update(of=of, skip_locked=skip, key_share=True)
    return found.execution_options(populate_existing=True)
