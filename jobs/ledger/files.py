"""Uploaded files: what the database knows of them. Their bytes lie in the data directory."""

from __future__ import annotations

import shutil
from typing import Any

import sqlalchemy as sa

from grpo_engine.contract.error import InvalidRequest, NotFound
from jobs.ledger.book import Book
from jobs.ledger.records import FileRecord, Order, Page
from jobs.tables import files


class FileBook(Book):
    """Files."""

    def add_file(
        self, file_id: str, *, filename: str, purpose: str, num_bytes: int, sha256: str, rows: int | None = None, project: str = "default"
    ) -> FileRecord:
        """Record an upload whose content is in place (`Artifacts.file_content`)."""
        record = FileRecord(file_id, project, filename, purpose, num_bytes, sha256, self.clock(), rows)
        with self.database.write() as connection:
            connection.execute(
                sa.insert(files).values(
                    id=file_id, project=project, filename=filename, purpose=purpose, bytes=num_bytes, sha256=sha256,
                    created_at=record.created_at, rows=rows,
                )
            )  # fmt: skip
        return record

    def get_file(self, file_id: str) -> FileRecord:
        """The file. Raises NotFound."""
        with self.database.read() as connection:
            row = connection.execute(sa.select(files).where(files.c.id == file_id, files.c.deleted_at.is_(None))).one_or_none()
        if row is None:
            raise NotFound(f"no file has the id {file_id[:80]!r}; upload it, or check the id against the list of files")
        return _file_record(row)

    def list_files(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        order: Order = "desc",
        purpose: str | None = None,
        project: str | None = None,
    ) -> Page[FileRecord]:
        """A page in order of upload; the cursor is a file id."""
        query = sa.select(files).where(files.c.deleted_at.is_(None))
        with self.database.read() as connection:
            if after is not None:
                edge = connection.execute(sa.select(files.c.created_at, files.c.id).where(files.c.id == after)).one_or_none()
                if edge is None:
                    raise InvalidRequest(
                        f"after names no file: {after[:80]!r}; use the id of the last file of the page before", param="after"
                    )
                position, mark = sa.tuple_(files.c.created_at, files.c.id), sa.tuple_(edge.created_at, edge.id)
                query = query.where(position < mark if order == "desc" else position > mark)
            if purpose is not None:
                query = query.where(files.c.purpose == purpose)
            if project is not None:
                query = query.where(files.c.project == project)
            way = sa.desc if order == "desc" else sa.asc
            rows = connection.execute(query.order_by(way(files.c.created_at), way(files.c.id)).limit(limit + 1)).all()
        return Page([_file_record(row) for row in rows[:limit]], len(rows) > limit)

    def delete_file(self, file_id: str) -> None:
        """Forget a file and remove its bytes; jobs keep their own link. Raises NotFound."""
        self.get_file(file_id)
        with self.database.write() as connection:
            connection.execute(sa.update(files).where(files.c.id == file_id).values(deleted_at=self.clock()))
        directory = self.artifacts.file_dir(file_id)
        if directory.exists():
            shutil.rmtree(directory)


def _file_record(row: sa.Row[Any]) -> FileRecord:
    return FileRecord(row.id, row.project, row.filename, row.purpose, row.bytes, row.sha256, row.created_at, row.rows)
