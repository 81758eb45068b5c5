"""The service's durable state, in three SQLite files: the request log, stored prompts and answers, and
tenants and keys with their audit chain.

`history.db` (`store.requests`), `contents.db` (`store.contents`) and `control.db` (`store.control`,
`store.audit`) each have one writer thread (`store.writer`). All other code opens the files with
`store.database.open_readonly`. `docs/store.md` describes the files for auditors.
"""
